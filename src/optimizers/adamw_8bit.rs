//! AdamW with moments of 8 bits (Dettmers et al. 2022), as bitsandbytes has it: blocks of elements
//! share a factor, the largest size among them, and each element is the nearest of 256 numbers.

use std::sync::LazyLock;

use rayon::prelude::*;

use super::elementwise::{Chunk, ElementRule};
use super::{AdamW, CHUNK, Masters, RuleState, StateDtype, Update, UpdateRule};
use crate::models::Tensor;

/// AdamW whose two moments take a byte a parameter each, and a float for each block. Small tensors
/// keep moments of floats.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW8bit {
    /// The hyperparameters.
    pub adamw: AdamW,
    /// Elements of a tensor that share a factor: a power of two from 16 to
    /// [`LARGEST_BLOCK`](AdamW8bit::LARGEST_BLOCK).
    pub block_size: usize,
    /// Tensors with fewer elements keep moments of floats.
    pub smallest: usize,
}

impl AdamW8bit {
    /// Tensors with fewer elements keep moments of floats by default.
    pub const SMALLEST: usize = 4096;

    /// The most elements of a block.
    pub const LARGEST_BLOCK: usize = 4096;

    fn is_coded(&self, tensor: &Tensor) -> bool {
        tensor.len() >= self.smallest
    }
}

/// 256 numbers from -1 or 0 to 1, in their order: fractions in steps that shrink by powers of ten
/// towards 0 (Dettmers 2016).
struct Map {
    values: [f32; 256],
    /// The code of the least number of each [bucket].
    first: Vec<u8>,
}

/// Numbers are looked up by their upper bits: sign, exponent and five bits of the fraction.
const LOWER_BITS: u32 = 18;

fn bucket(value: f32) -> usize {
    (value.to_bits() >> LOWER_BITS) as usize
}

static SIGNED: LazyLock<Map> = LazyLock::new(|| Map::new(true));
static UNSIGNED: LazyLock<Map> = LazyLock::new(|| Map::new(false));

impl Map {
    fn new(is_signed: bool) -> Map {
        const EXPONENTS: i32 = 7;
        let mut all = vec![0.0, 1.0];
        for exponent in 0..EXPONENTS {
            let steps = 1 << (exponent + i32::from(!is_signed));
            // Means of neighbours among numbers from 0.1 to 1 with equal distances.
            let at = |step: i32| 0.1 + 0.9 * f64::from(step) / f64::from(steps);
            let means = (0..steps).map(|step| (at(step) + at(step + 1)) / 2.0);
            for mean in means.map(|mean| 10_f64.powi(exponent + 1 - EXPONENTS) * mean) {
                all.push(mean as f32);
                all.extend(is_signed.then_some(-mean as f32));
            }
        }
        all.sort_by(f32::total_cmp);
        let values: [f32; 256] = all.try_into().expect("128 - 1 fractions of each sign, or 254");
        let mut map = Map { values, first: Vec::new() };
        let buckets = 1_u32 << (u32::BITS - LOWER_BITS);
        let first = (0..buckets).map(|bucket| {
            let lower = bucket << LOWER_BITS;
            let is_negative = f32::from_bits(lower).is_sign_negative();
            let least = if is_negative { lower | ((1 << LOWER_BITS) - 1) } else { lower };
            map.search(0, f32::from_bits(least))
        });
        map.first = first.collect();
        map
    }

    /// The code of the number nearest to a value, which is not below that of `from`.
    #[inline(always)]
    fn search(&self, from: u8, value: f32) -> u8 {
        let mut code = from;
        while code < 255 {
            let [this, next] = [code, code + 1].map(|code| self.values[usize::from(code)]);
            if value <= (this + next) * 0.5 || value.is_nan() {
                break;
            }
            code += 1;
        }
        code
    }

    #[inline(always)]
    fn code(&self, value: f32) -> u8 {
        self.search(self.first[bucket(value)], value)
    }

    #[inline(always)]
    fn decode(&self, to: &mut [f32], codes: &[u8], largest: f32) {
        for (to, &code) in to.iter_mut().zip(codes) {
            *to = self.values[usize::from(code)] * largest;
        }
    }

    /// Encodes a block, and gives its largest size.
    #[inline(always)]
    fn encode(&self, codes: &mut [u8], values: &[f32]) -> f32 {
        let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        let divisor = if largest > 0.0 { largest } else { 1.0 };
        for (code, &value) in codes.iter_mut().zip(values) {
            *code = self.code(value / divisor);
        }
        largest
    }
}

/// One moment of a chunk: its codes, and the largest size of each block.
struct Moment<'a> {
    map: &'static Map,
    codes: &'a mut [u8],
    largest: &'a mut [f32],
}

#[inline(always)]
fn update_chunk(
    masters: Masters<'_>,
    moments: [Moment<'_>; 2],
    gradient: &[f32],
    rule: impl ElementRule<2>,
    block_size: usize,
) {
    let [m, v] = moments;
    let mut decoded = [[0.0; AdamW8bit::LARGEST_BLOCK]; 2];
    let [of_m, of_v] = &mut decoded;
    let pieces = masters.chunks(block_size).into_iter().zip(gradient.chunks(block_size));
    let codes = m.codes.chunks_mut(block_size).zip(v.codes.chunks_mut(block_size));
    let moments = codes.zip(m.largest.iter_mut().zip(v.largest));
    for ((masters, gradient), ((of_block, v_codes), (largest, v_largest))) in pieces.zip(moments) {
        let len = gradient.len();
        m.map.decode(&mut of_m[..len], of_block, *largest);
        v.map.decode(&mut of_v[..len], v_codes, *v_largest);
        Chunk { masters, states: [&mut of_m[..len], &mut of_v[..len]], gradient, rule }.run();
        *largest = m.map.encode(of_block, &of_m[..len]);
        *v_largest = v.map.encode(v_codes, &of_v[..len]);
    }
}

impl AdamW8bit {
    /// Updates a tensor whose moments are coded.
    fn update(
        &self,
        tensor: &Tensor,
        masters: Masters<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        let [m, m_largest, v, v_largest] = states else { unreachable!("two coded moments") };
        let len = gradient.len();
        let block_size = self.block_size;
        let m = &mut bytemuck::cast_slice_mut::<f32, u8>(m)[..len];
        let v = &mut bytemuck::cast_slice_mut::<f32, u8>(v)[..len];
        let rule = self.adamw.rule(tensor, update);
        let blocks = CHUNK / block_size;
        let codes = m.par_chunks_mut(CHUNK).zip(v.par_chunks_mut(CHUNK));
        let largest = m_largest.par_chunks_mut(blocks).zip(v_largest.par_chunks_mut(blocks));
        let chunks = masters.chunks(CHUNK).into_par_iter();
        let chunks = chunks.zip(gradient.par_chunks(CHUNK)).zip(codes.zip(largest));
        let signed = &*SIGNED;
        let unsigned = &*UNSIGNED;
        chunks.for_each(|((masters, gradient), ((m, v), (m_largest, v_largest)))| {
            let m = Moment { map: signed, codes: m, largest: m_largest };
            let v = Moment { map: unsigned, codes: v, largest: v_largest };
            update.level.run(
                #[inline(always)]
                || update_chunk(masters, [m, v], gradient, rule, block_size),
            );
        });
    }
}

impl UpdateRule for AdamW8bit {
    fn state_layout(&self, tensor: &Tensor) -> Vec<RuleState> {
        if !self.is_coded(tensor) {
            return self.adamw.state_layout(tensor);
        }
        let codes = |name| RuleState { dtype: StateDtype::U8, ..RuleState::like(name, tensor) };
        let blocks = vec![tensor.len().div_ceil(self.block_size)];
        let largest = |name| RuleState { shape: blocks.clone(), ..RuleState::like(name, tensor) };
        vec![
            codes("exp_avg"),
            largest("exp_avg_absmax"),
            codes("exp_avg_sq"),
            largest("exp_avg_sq_absmax"),
        ]
    }

    fn apply(
        &self,
        tensor: &Tensor,
        masters: Masters<'_>,
        states: &mut [&mut [f32]],
        gradient: &[f32],
        update: Update,
    ) {
        if self.is_coded(tensor) {
            self.update(tensor, masters, states, gradient, update);
        } else {
            self.adamw.apply(tensor, masters, states, gradient, update);
        }
    }

    fn joins_masters(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers are bitsandbytes' (`tests/goldens/optimizers.py`), and each value gets the code
    /// of the nearest one.
    #[test]
    fn codes_are_of_the_nearest_number() {
        let text = include_str!("../../tests/goldens/optimizers.json");
        let golden: serde_json::Value = serde_json::from_str(text).expect("it is committed");
        for (map, name) in [(&*SIGNED, "signed"), (&*UNSIGNED, "unsigned")] {
            let expected = golden["maps"][name].as_array().expect("a list");
            assert_eq!(expected.len(), 256);
            for (value, expected) in map.values.iter().zip(expected) {
                let expected = expected.as_f64().expect("a number");
                assert!((f64::from(*value) - expected).abs() <= 2e-7 * expected.abs(), "{value}");
            }
            let values = (-30_000..=30_000).map(|at| at as f32 / 30_000.0);
            let small = (0..2000).map(|at| (at as f32 * 0.01 - 20.0).exp());
            for value in values.chain(small) {
                let code = map.code(value);
                assert_eq!(code, map.search(0, value), "{value}");
                // In the middle between two numbers either is the nearest.
                let error = |code: u8| (map.values[usize::from(code)] - value).abs();
                let neighbours = [code.saturating_sub(1), code.saturating_add(1)];
                let is_nearest = |&other: &u8| error(code) <= error(other) + 1e-7;
                assert!(neighbours.iter().all(is_nearest), "{value}");
            }
        }
    }
}
