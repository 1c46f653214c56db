//! Rows behind others have the bits that they have beside them.

use super::*;
use crate::kernels::{Kernels, SequenceChunk};
use crate::tensor::{Scratch, View};

/// The tensors of the convolution and of the delta rule behind it. All but the gradients of weights
/// have a row each.
#[derive(Clone, Copy)]
struct Tensors {
    projected: View,
    dy: View,
    w: View,
    decay: HeadDecay,
    mixed: View,
    y: View,
    dmixed: View,
    dprojected: View,
    dw: View,
    ddecay: HeadDecay,
}

impl Tensors {
    fn new(bench: &mut Bench, heads: LinearHeads, rows: usize) -> Tensors {
        let mut put = |rows: usize, columns: usize, seed: u64| {
            bench.tensor(columns, &noise(rows * columns, seed).narrow)
        };
        let of_heads = heads.value_heads;
        Tensors {
            projected: put(rows, heads.projected(), 1),
            dy: put(rows, heads.values(), 2),
            w: put(heads.mixed(), heads.taps, 3),
            decay: HeadDecay { log: put(1, of_heads, 4), bias: put(1, of_heads, 5) },
            ..Tensors::outputs(bench, heads, rows)
        }
    }

    /// Places for outputs. The inputs have no element.
    fn outputs(bench: &mut Bench, heads: LinearHeads, rows: usize) -> Tensors {
        let none = View::floats(0, 0);
        let of_heads = heads.value_heads;
        let ddecay = HeadDecay { log: bench.nan(1, of_heads), bias: bench.nan(1, of_heads) };
        Tensors {
            projected: none,
            dy: none,
            w: none,
            decay: HeadDecay { log: none, bias: none },
            mixed: bench.nan(rows, heads.mixed()),
            y: bench.nan(rows, heads.values()),
            dmixed: bench.nan(rows, heads.mixed()),
            dprojected: bench.nan(rows, heads.projected()),
            dw: bench.nan(heads.mixed(), heads.taps),
            ddecay,
        }
    }

    /// These inputs, with other outputs.
    fn again(&self, bench: &mut Bench, heads: LinearHeads) -> Tensors {
        let Tensors { projected, dy, w, decay, .. } = *self;
        Tensors { projected, dy, w, decay, ..Tensors::outputs(bench, heads, projected.rows) }
    }

    fn rows(&self, rows: Range<usize>) -> Tensors {
        let of = |view: View| view.row_range(rows.clone());
        Tensors {
            projected: of(self.projected),
            dy: of(self.dy),
            mixed: of(self.mixed),
            y: of(self.y),
            dmixed: of(self.dmixed),
            dprojected: of(self.dprojected),
            ..*self
        }
    }

    fn forward(
        &self,
        k: &dyn Kernels,
        scratch: &Scratch<'_>,
        shape: LinearShape<'_>,
        carried: Carried,
    ) {
        let Tensors { projected, w, decay, mixed, y, .. } = *self;
        k.short_convolution(&ShortConvolution { y: mixed, projected, w, shape, carried });
        k.delta_rule(&DeltaRule { y, x: mixed, projected, decay, shape, carried }, scratch);
    }

    fn backward(
        &self,
        k: &dyn Kernels,
        scratch: &Scratch<'_>,
        shape: LinearShape<'_>,
        carried: CarriedGradients,
        accumulate: bool,
    ) {
        let Tensors { projected, dy, w, decay, mixed, dmixed, dprojected, dw, ddecay, .. } = *self;
        let rule = DeltaRuleBackward {
            dx: dmixed,
            dprojected,
            ddecay,
            dy,
            x: mixed,
            projected,
            decay,
            shape,
            carried,
            accumulate,
        };
        k.delta_rule_backward(&rule, scratch);
        let convolution = ShortConvolutionBackward {
            dprojected,
            dw,
            dy: dmixed,
            projected,
            w,
            shape,
            carried,
            accumulate,
        };
        k.short_convolution_backward(&convolution, scratch);
    }

    /// The bits of all tensors with a row each. The gradients of gates are not written.
    fn bits(&self, bench: &mut Bench) -> Vec<Vec<u32>> {
        let tensors = [self.mixed, self.y, self.dmixed, self.dprojected];
        tensors.map(|view| bench.values(view).into_iter().map(f32::to_bits).collect()).into()
    }
}

/// Ends of documents in a chunk, between two, and behind a convolution's first inputs.
const ENDS: [u32; 5] = [3, 10, 11, 40, 70];

/// A run over the chunks of a sequence, forward and then backward.
fn in_chunks(bench: &mut Bench, level: Level, cut: &Tensors, whole: LinearShape<'_>, most: usize) {
    let rows = whole.batch.rows();
    let heads = whole.heads;
    let chunks: Vec<Range<usize>> =
        (0..rows).step_by(most).map(|from| from..rows.min(from + most)).collect();
    let places: Vec<[View; 2]> =
        chunks.iter().map(|_| [(); 2].map(|()| bench.nan(1, heads.carried()))).collect();
    let of = |nth: usize| {
        let Range { start: from, end: to } = chunks[nth];
        let batch = whole.batch.chunk_of(SequenceChunk { sequence: 0, from, to });
        (cut.rows(from..to), LinearShape { batch, heads })
    };
    let last = chunks.len() - 1;
    let before = |nth: usize| Some(places[nth.checked_sub(1)?]);
    let behind = |nth: usize| (nth < last).then_some(places[nth]);
    bench.run(level, |k, scratch| {
        for nth in 0..=last {
            let (tensors, shape) = of(nth);
            let carried = Carried {
                before: before(nth).map(|[state, _]| state),
                behind: behind(nth).map(|[state, _]| state),
            };
            tensors.forward(k, scratch, shape, carried);
        }
        for nth in (0..=last).rev() {
            let (tensors, shape) = of(nth);
            let carried = CarriedGradients {
                before: before(nth).map(|[state, _]| state),
                dbefore: before(nth).map(|[_, d]| d),
                dbehind: behind(nth).map(|[_, d]| d),
            };
            tensors.backward(k, scratch, shape, carried, nth < last);
        }
    });
}

#[test]
fn chunks_of_a_sequence_have_the_bits_of_the_whole() {
    const ROWS: usize = 70;
    let firsts = [0].into_iter().chain(ENDS);
    let documents: Vec<Document> = firsts
        .zip(ENDS)
        .flat_map(|(from, to)| vec![Document { from, to }; (to - from) as usize])
        .collect();
    for (heads, documents) in
        [(WIDE, &documents[..]), (TALL, &[]), (LinearHeads { taps: 5, ..TALL }, &documents[..])]
    {
        let batch = BatchMetadata { documents, ..BatchMetadata::plain(&[0, ROWS]) };
        let shape = LinearShape { batch: batch.view(), heads };
        for (level, most) in
            Level::all().into_iter().flat_map(|level| [1, 3, 32, 64].map(|most| (level, most)))
        {
            let mut bench = Bench::new();
            let whole = Tensors::new(&mut bench, heads, ROWS);
            let cut = whole.again(&mut bench, heads);
            bench.run(level, |k, scratch| {
                whole.forward(k, scratch, shape, Carried::default());
                whole.backward(k, scratch, shape, CarriedGradients::default(), false);
            });
            in_chunks(&mut bench, level, &cut, shape, most);
            assert_eq!(cut.bits(&mut bench), whole.bits(&mut bench), "{heads:?} {most}");
            let of_weights = |one: Tensors| [one.dw, one.ddecay.log, one.ddecay.bias];
            for (cut, whole) in of_weights(cut).into_iter().zip(of_weights(whole)) {
                let wide: Vec<f64> = bench.values(whole).into_iter().map(f64::from).collect();
                close(&bench.values(cut), &wide, 1e-5);
            }
        }
    }
}

/// Rows that come one by one, with sequences of other lengths beside them, one of which begins.
#[test]
fn rows_behind_earlier_ones_have_the_same_bits() {
    const LENGTHS: [usize; 3] = [7, 33, 2];
    const FIRST: [usize; 3] = [5, 31, 0];
    let heads = WIDE;
    let starts: Vec<usize> = (0..=3).map(|nth| LENGTHS[..nth].iter().sum::<usize>()).collect();
    let rows = starts[3];
    for level in Level::all() {
        let mut bench = Bench::new();
        let whole = Tensors::new(&mut bench, heads, rows);
        let projected = bench.values(whole.projected);
        let mut states = [(); 2].map(|()| bench.nan(3, heads.carried()));
        let all = LinearShape { batch: BatchMetadata::plain(&starts).view(), heads };
        bench.run(level, |k, scratch| whole.forward(k, scratch, all, Carried::default()));
        let mut cached = [0; 3];
        for new in [FIRST, [1, 1, 1], [1, 1, 1]] {
            // The first rows of a sequence that comes later are not there yet.
            let are_there: Vec<usize> = (0..3).filter(|&one| new[one] > 0).collect();
            let own = |one: usize| starts[one] + cached[one]..starts[one] + cached[one] + new[one];
            let of_rows = |width: usize, from: &[f32]| -> Vec<f32> {
                let rows = are_there.iter().flat_map(|&one| own(one));
                rows.flat_map(|row| from[row * width..][..width].to_vec()).collect()
            };
            let count: usize = new.iter().sum();
            let some = Tensors {
                projected: bench.tensor(heads.projected(), &of_rows(heads.projected(), &projected)),
                w: whole.w,
                decay: whole.decay,
                ..Tensors::outputs(&mut bench, heads, count)
            };
            let lengths = are_there.iter().map(|&one| new[one]);
            let mut starts = vec![0];
            lengths.for_each(|length| starts.push(starts[starts.len() - 1] + length));
            let before: Vec<usize> = are_there.iter().map(|&one| cached[one]).collect();
            let batch = BatchMetadata { cached: &before, ..BatchMetadata::plain(&starts) };
            let shape = LinearShape { batch: batch.view(), heads };
            let [before, behind] = states.map(|view| view.row_range(0..are_there.len()));
            let carried = Carried { before: Some(before), behind: Some(behind) };
            bench.run(level, |k, scratch| some.forward(k, scratch, shape, carried));
            for (found, all) in [(some.mixed, whole.mixed), (some.y, whole.y)] {
                let expected = of_rows(found.columns, &bench.values(all));
                assert_eq!(bench.values(found), expected);
            }
            states.reverse();
            are_there.iter().for_each(|&one| cached[one] += new[one]);
        }
    }
}
