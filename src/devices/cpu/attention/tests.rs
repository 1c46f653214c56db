//! Compares attention with a plain one in f64, and attention in chunks with attention at once.

use super::*;
use crate::devices::cpu::oracle::{Bench, close, differences, noise};
use crate::kernels::{
    BatchMetadata, ChunkKv, Clear, Document, DropoutKey, Kernels, ReadKv, SequenceChunk, WriteKv,
};
use crate::tensor::{Scratch, View};

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
            let ahead = if size.causal { Some(1) } else { size.window };
            let end = ahead.map_or(end, |ahead| end.min(query + ahead));
            let score = |key| {
                let products = at(query, 0).iter().zip(at(key, 1)).map(|(q, k)| q * k);
                let scale = size.scale.map_or(1.0 / (d as f64).sqrt(), f64::from);
                let score = products.sum::<f64>() * scale;
                size.cap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
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

/// A factor and a limit of scores.
#[derive(Clone, Copy, Default)]
struct Scores {
    scale: Option<f32>,
    cap: Option<f32>,
}

fn check(
    sizes: [usize; 2],
    heads: [usize; 3],
    causal: bool,
    window: Option<usize>,
    p: f32,
    every: &[usize],
) {
    check_scores(sizes, heads, causal, window, p, every, Scores::default());
}

fn check_scores(
    [sequences, t]: [usize; 2],
    [h, kv_heads, d]: [usize; 3],
    causal: bool,
    window: Option<usize>,
    p: f32,
    every: &[usize],
    Scores { scale, cap }: Scores,
) {
    let lengths: Vec<usize> = (0..sequences).map(|b| t - (b * 3) % t).collect();
    let documents = if every.is_empty() { Vec::new() } else { cut(&lengths, every) };
    let starts: Vec<usize> =
        (0..=sequences).map(|sequence| lengths[..sequence].iter().sum()).collect();
    let metadata = BatchMetadata {
        documents: &documents,
        dropout_key: Some(DropoutKey { seed: 1, step: 2, first_sequence: 4 }),
        ..BatchMetadata::plain(&starts)
    };
    let batch = metadata.view();
    let dropout = batch.dropout(p, 3, 0);
    let shape = AttentionShape::causal(batch, [h, kv_heads, d]);
    let size = AttentionShape { causal, window, scale, cap, dropout, ..shape };
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
        let mut bench = Bench::new();
        let pass = Pass {
            y: bench.nan(r, c),
            lse: bench.nan(r, h),
            dqkv: bench.nan(r, size.qkv_width()),
            qkv: bench.tensor(size.qkv_width(), &qkv.narrow),
            dy: bench.tensor(c, &dy.narrow),
        };
        bench.run(level, |k, scratch| pass.run(k, scratch, None, size));
        close(&bench.values(pass.y), &expected, 1e-5);
        let dqkv = bench.values(pass.dqkv);
        if let Some(gradient) = &gradient {
            close(&dqkv, gradient, 1e-4);
        }
        assert!(dqkv.iter().all(|value| value.is_finite()));
        if causal {
            check_chunks(&mut bench, level, pass, size);
        }
    }
}

/// Views of attention forward and backward.
#[derive(Clone, Copy)]
struct Pass {
    y: View,
    lse: View,
    dqkv: View,
    qkv: View,
    dy: View,
}

impl Pass {
    fn run(
        self,
        k: &dyn Kernels,
        scratch: &Scratch<'_>,
        chunk_kv: Option<ChunkKv>,
        shape: AttentionShape<'_>,
    ) {
        let Pass { y, lse, dqkv, qkv, dy } = self;
        k.attention(&Attention { y, lse, qkv, kv: chunk_kv.map(|chunk| chunk.kv), shape });
        let backward = AttentionBackward { dqkv, chunk_kv, dy, y, lse, qkv, shape };
        k.attention_backward(&backward, scratch);
    }
}

/// Walks chunks of one tile from the end, with keys and values in a tensor of their own, of which
/// kernels get what does not lie behind a window. The results equal those of attention at once.
fn check_chunks(bench: &mut Bench, level: Level, all: Pass, size: AttentionShape<'_>) {
    for sequence in 0..size.batch.sequences() {
        let rows = size.batch.sequence(sequence);
        let t = rows.len();
        let chunk = |from, to| {
            let batch = size.batch.chunk_of(SequenceChunk { sequence, from, to });
            let dropout = size.dropout.and_then(|of_all| batch.dropout(of_all.probability, 3, 0));
            AttentionShape { batch, dropout, ..size }
        };
        let [kv, dkv] = [(); 2].map(|()| bench.nan(t, size.kv_width()));
        let qkv = all.qkv.row_range(rows.clone());
        bench.run(level, |k, _| k.write_kv(&WriteKv { kv, qkv, shape: chunk(0, t) }));
        let mut first_written = t;
        for from in (0..t).step_by(TILE).rev() {
            let to = t.min(from + TILE);
            let of = |view: View| view.row_range(rows.start + from..rows.start + to);
            let [y, lse, dqkv] =
                [all.y, all.lse, all.dqkv].map(|view| bench.nan(to - from, view.columns));
            let few = Pass { y, lse, dqkv, qkv: of(all.qkv), dy: of(all.dy) };
            let behind = size.window.map_or(0, |window| (from + 1).saturating_sub(window));
            let first = behind / 128 * 128;
            let [before, dbefore] = [kv, dkv].map(|view| view.row_range(first..to));
            let new = dkv.row_range(first..first_written.max(first));
            first_written = first_written.min(first);
            let chunk_kv = ChunkKv { kv: before, dkv: dbefore, accumulate: to < t };
            let shape = chunk(from, to);
            bench.run(level, |k, scratch| {
                k.clear(&Clear { y: new });
                few.run(k, scratch, Some(chunk_kv), shape);
                k.read_kv(&ReadKv { qkv: dqkv, kv: dkv.row_range(from..to), shape });
            });
            assert_eq!(bench.values(y), bench.values(of(all.y)), "{from}");
            let expected: Vec<f64> =
                bench.values(of(all.dqkv)).iter().map(|d| f64::from(*d)).collect();
            close(&bench.values(dqkv), &expected, 1e-5);
        }
    }
}

#[test]
fn forward_and_backward_are_the_plain_ones() {
    for causal in [true, false] {
        for p in [0.0, 0.2] {
            check([1, 1], [1, 1, 8], causal, None, p, &[]);
            check([3, 5], [2, 2, 3], causal, None, p, &[]);
            check([1, 67], [1, 1, 3], causal, None, p, &[]);
            check([2, 130], [2, 2, 13], causal, None, p, &[]);
        }
    }
}

#[test]
fn shared_keys_and_windows_are_the_plain_ones() {
    for (t, heads) in [(5, [4, 2, 3]), (5, [3, 1, 2]), (70, [2, 1, 2])] {
        check([2, t], heads, true, None, 0.2, &[]);
        for window in [1, 2, 3, 65, 100] {
            check([2, t], heads, true, Some(window), 0.0, &[]);
        }
    }
    check([1, 200], [2, 1, 5], true, Some(40), 0.0, &[]);
    check([1, 400], [2, 1, 5], true, Some(20), 0.2, &[70, 30]);
    check([2, 5], [4, 2, 3], false, None, 0.0, &[]);
    for window in [1, 2, 65, 100] {
        check([2, 70], [2, 1, 2], false, Some(window), 0.0, &[]);
    }
    check([1, 300], [2, 1, 5], false, Some(20), 0.2, &[]);
    check([1, 200], [2, 1, 5], false, Some(40), 0.0, &[70, 30]);
}

#[test]
fn scores_with_a_factor_and_a_limit_are_the_plain_ones() {
    for scale in [None, Some(1.5)] {
        for cap in [None, Some(0.6), Some(20.0)] {
            let scores = Scores { scale, cap };
            check_scores([2, 5], [4, 2, 3], true, None, 0.2, &[], scores);
            check_scores([2, 6], [2, 1, 3], false, None, 0.0, &[2, 1], scores);
            check_scores([1, 200], [2, 1, 5], true, Some(40), 0.0, &[], scores);
        }
    }
}

#[test]
fn documents_see_themselves_alone() {
    for causal in [true, false] {
        check([2, 6], [2, 1, 3], causal, None, 0.0, &[2, 1]);
        check([2, 7], [1, 1, 4], causal, None, 0.2, &[3]);
        check([2, 200], [1, 1, 3], causal, None, 0.0, &[70, 3, 64, 1]);
    }
    check([2, 8], [2, 2, 2], true, Some(2), 0.0, &[3, 5]);
    check([1, 150], [1, 1, 3], true, Some(20), 0.0, &[70, 30]);
}

#[test]
fn heads_of_every_size_work() {
    for d in [8, 63, 64, 65, 127, 128, 256] {
        check([2, 70], [1, 1, d], true, None, 0.0, &[]);
    }
    for d in [257, 512] {
        check([1, 66], [1, 1, d], true, None, 0.0, &[]);
    }
}
