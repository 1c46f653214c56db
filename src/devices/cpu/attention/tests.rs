//! Compares attention with a plain one in f64, and attention in chunks with attention at once.

use super::*;
use crate::devices::cpu::kv_cache::{copy_from_qkv, copy_to_qkv};
use crate::devices::cpu::oracle::{close, differences, noise};
use crate::kernels::{BatchMetadata, Document, DropoutKey, SequenceChunk};

/// Plain attention in f64. It shares the dropout masks with the kernel, and nothing else.
fn plain(qkv: &[f64], size: &AttentionShape<'_>) -> Vec<f64> {
    let h = size.heads;
    let d = size.head_size;
    let c = h * d;
    let k = size.kv_heads;
    let mut y = vec![0.0; size.rows() * c];
    for (sequence, head) in (0..size.batch.sequences() * h).map(|i| (i / h, i % h)) {
        let rows = size.batch.sequence(sequence);
        let at = |position: usize, which: usize| {
            let column = [head, h + head / (h / k), h + k + head / (h / k)][which];
            let from = (rows.start + position) * (h + 2 * k) * d + column * d;
            &qkv[from..from + d]
        };
        for query in 0..rows.len() {
            let (from, end) = match size.batch.document(sequence, query) {
                Some(document) => (document.from as usize, document.to as usize),
                None => (0, rows.len()),
            };
            let end = end.min(if size.causal { query + 1 } else { rows.len() });
            let score = |key| {
                let products = at(query, 0).iter().zip(at(key, 1)).map(|(q, k)| q * k);
                products.sum::<f64>() / (d as f64).sqrt()
            };
            let first = size.window.map_or(0, |window| (query + 1).saturating_sub(window));
            let first = first.max(from);
            let scores: Vec<(usize, f64)> = (first..end).map(|key| (key, score(key))).collect();
            let total: f64 = scores.iter().map(|(_, score)| score.exp()).sum();
            for (key, score) in scores {
                let factor = size.dropout.map_or(1.0, |dropout| {
                    let row = (head as u32) << 20 | query as u32;
                    let factors = Row::new(&dropout, sequence, row).factors(key / 4 * 4);
                    f64::from(factors[key % 4])
                });
                for (i, v) in at(key, 2).iter().enumerate() {
                    let to = (rows.start + query) * c + head * d + i;
                    y[to] += factor * score.exp() / total * v;
                }
            }
        }
    }
    y
}

fn check(sequences: usize, t: usize, h: usize, d: usize, causal: bool, p: f32) {
    check_more(sequences, t, [h, h, d], causal, None, p);
}

/// Cuts sequences of these lengths into documents, whose lengths repeat `every`.
fn cut(lengths: &[usize], every: &[usize]) -> Vec<Document> {
    let mut all = Vec::new();
    for &length in lengths {
        let mut at = 0;
        let mut turn = every.iter().cycle();
        while at < length {
            let to = length.min(at + turn.next().expect("it goes round"));
            all.extend(vec![Document { from: at as u32, to: to as u32 }; to - at]);
            at = to;
        }
    }
    all
}

fn check_more(
    sequences: usize,
    t: usize,
    [h, kv_heads, d]: [usize; 3],
    causal: bool,
    window: Option<usize>,
    p: f32,
) {
    check_documents(sequences, t, [h, kv_heads, d], causal, window, p, &[]);
}

fn check_documents(
    sequences: usize,
    t: usize,
    [h, kv_heads, d]: [usize; 3],
    causal: bool,
    window: Option<usize>,
    p: f32,
    every: &[usize],
) {
    let lengths: Vec<usize> = (0..sequences).map(|b| t - (b * 3) % t).collect();
    let documents = if every.is_empty() { Vec::new() } else { cut(&lengths, every) };
    let starts: Vec<usize> =
        (0..=sequences).map(|sequence| lengths[..sequence].iter().sum()).collect();
    let metadata = BatchMetadata {
        starts: &starts,
        kinds: &[],
        documents: &documents,
        cached: &[],
        dropout_key: Some(DropoutKey { seed: 1, step: 2, first_sequence: 4 }),
    };
    let batch = metadata.view();
    let size = AttentionShape {
        batch,
        heads: h,
        kv_heads,
        head_size: d,
        causal,
        window,
        dropout: batch.dropout(p, 3, 0),
    };
    let r = size.rows();
    let c = h * d;
    let qkv = noise(r * size.qkv_width(), 1);
    let dy = noise(r * c, 2);
    let expected = plain(&qkv.wide, &size);
    let gradient = (r * c < 400).then(|| {
        differences(&qkv.wide, |qkv| {
            plain(qkv, &size).iter().zip(&dy.wide).map(|(y, dy)| y * dy).sum()
        })
    });
    for level in Level::all() {
        let mut y = vec![f32::NAN; r * c];
        let mut lse = vec![f32::NAN; r * h];
        forward(level, &mut y, &mut lse, &qkv.narrow, None, &size);
        close(&y, &expected, 1e-5);
        let mut sums = vec![f32::NAN; r * h];
        delta(level, &mut sums, &y, &dy.narrow, &size);
        let mut dqkv = vec![f32::NAN; r * size.qkv_width()];
        let dy_all = &dy.narrow;
        let qkv_all = &qkv.narrow;
        let inputs = Inputs { dy: dy_all, lse: &lse, qkv: qkv_all, kv: None, delta: &sums };
        backward(level, &mut dqkv, None, &inputs, &size);
        if let Some(gradient) = &gradient {
            close(&dqkv, gradient, 1e-4);
        }
        assert!(dqkv.iter().all(|value| value.is_finite()));
        if causal {
            check_chunks(level, [&y, &dqkv], [&qkv.narrow, &dy.narrow], &size);
        }
    }
}

/// Walks chunks of one tile from the end, with keys and values in a tensor of their own. The
/// results equal those of attention at once.
fn check_chunks(
    level: Level,
    [y, dqkv]: [&[f32]; 2],
    [qkv, dy]: [&[f32]; 2],
    size: &AttentionShape<'_>,
) {
    let h = size.heads;
    let c = size.heads * size.head_size;
    let packed = size.qkv_width();
    let width = size.kv_width();
    for sequence in 0..size.batch.sequences() {
        let rows = size.batch.sequence(sequence);
        let t = rows.len();
        let of = |x: &[f32], width: usize| x[rows.start * width..rows.end * width].to_vec();
        let y = of(y, c);
        let dqkv = of(dqkv, packed);
        let qkv = of(qkv, packed);
        let dy = of(dy, c);
        let mut kv = vec![0.0; t * width];
        copy_from_qkv(&mut kv, &qkv, size);
        let mut dkv = vec![f32::NAN; t * width];
        for from in (0..t).step_by(TILE).rev() {
            let to = t.min(from + TILE);
            let batch = size.batch.chunk_of(SequenceChunk { sequence, from, to });
            let dropout = size.dropout.and_then(|of_all| batch.dropout(of_all.probability, 3, 0));
            let few = AttentionShape { batch, dropout, ..*size };
            let r = to - from;
            let qkv = &qkv[from * packed..to * packed];
            let dy = &dy[from * c..to * c];
            let mut found = vec![f32::NAN; r * c];
            let mut lse = vec![f32::NAN; r * h];
            let before = Some(&kv[..to * width]);
            forward(level, &mut found, &mut lse, qkv, before, &few);
            assert_eq!(found, y[from * c..to * c], "{from}");
            let mut sums = vec![f32::NAN; r * h];
            delta(level, &mut sums, &found, dy, &few);
            let inputs = Inputs { dy, lse: &lse, qkv, kv: before, delta: &sums };
            let mut dq = vec![f32::NAN; r * packed];
            let dkv = &mut dkv[..to * width];
            let part = DkvPart { values: dkv, accumulate: to < t };
            backward(level, &mut dq, Some(part), &inputs, &few);
            copy_to_qkv(&mut dq, &dkv[from * width..], &few);
            let expected: Vec<f64> =
                dqkv[from * packed..to * packed].iter().map(|d| f64::from(*d)).collect();
            close(&dq, &expected, 1e-5);
        }
    }
}

#[test]
fn forward_and_backward_are_the_plain_ones() {
    for causal in [true, false] {
        for p in [0.0, 0.2] {
            check(1, 1, 1, 8, causal, p);
            check(3, 5, 2, 3, causal, p);
            check(1, 67, 1, 3, causal, p);
            check(2, 130, 2, 13, causal, p);
        }
    }
}

#[test]
fn shared_keys_and_windows_are_the_plain_ones() {
    for (t, heads) in [(5, [4, 2, 3]), (5, [3, 1, 2]), (70, [2, 1, 2])] {
        check_more(2, t, heads, true, None, 0.2);
        for window in [1, 2, 3, 65, 100] {
            check_more(2, t, heads, true, Some(window), 0.0);
        }
    }
    check_more(1, 200, [2, 1, 5], true, Some(40), 0.0);
    check_more(2, 5, [4, 2, 3], false, None, 0.0);
}

#[test]
fn documents_see_themselves_alone() {
    for causal in [true, false] {
        check_documents(2, 6, [2, 1, 3], causal, None, 0.0, &[2, 1]);
        check_documents(2, 7, [1, 1, 4], causal, None, 0.2, &[3]);
        check_documents(2, 200, [1, 1, 3], causal, None, 0.0, &[70, 3, 64, 1]);
    }
    check_documents(2, 8, [2, 2, 2], true, Some(2), 0.0, &[3, 5]);
    check_documents(1, 150, [1, 1, 3], true, Some(20), 0.0, &[70, 30]);
}

#[test]
fn heads_of_every_size_work() {
    for d in [8, 63, 64, 65, 127, 128, 256] {
        check(2, 70, 1, d, true, 0.0);
    }
}
