//! Cases of attention and of other kernels over heads.

use super::Cases;
use crate::kernels::{
    Attention, AttentionBackward, AttentionShape, CachedAttention, ChunkKv, ColumnGroups, HeadNorm,
    HeadNormBackward, HeadValues, LinearHeads, LongRope, PAIRS, QkNorm, QueryGrowth, QueryKey,
    ReadKv, RegroupColumns, Rotary, RotaryScaling, Rotate, Sink, SinkBackward, WriteKv,
};

impl<'c> Cases<'c> {
    pub(in super::super) fn of_heads(&mut self) {
        let sizes = [[1, 1, 8], [4, 2, 6], [2, 1, 66], [1, 1, 256], [2, 1, 64], [2, 1, 128]];
        for heads in sizes {
            let shape = self.attention(heads);
            self.of_rotations(shape);
            self.of_head_norms(shape);
            self.of_kv_copies(shape);
            self.of_regrouped_heads(shape);
            self.of_sinks(shape);
            if self.has_cached() {
                self.of_cached_attention(shape);
                continue;
            }
            for (causal, window) in [(true, None), (false, None), (true, Some(3)), (false, Some(3))]
            {
                self.of_attention(AttentionShape { causal, window, ..shape });
            }
        }
        // One norm of several heads together is wider than any head.
        self.of_head_norms(self.attention([1, 1, 330]));
    }

    /// Cases of heads of the usual sizes, over several tiles of positions.
    pub(in super::super) fn of_wide_heads(&mut self) {
        for heads in [[2, 1, 64], [if cfg!(test) { 4 } else { 8 }, 2, 128]] {
            let shape = self.attention(heads);
            for (causal, window) in
                [(true, None), (false, None), (true, Some(100)), (false, Some(70))]
            {
                self.of_attention(AttentionShape { causal, window, ..shape });
            }
        }
    }

    fn of_rotations(&mut self, shape: AttentionShape<'c>) {
        const WHOLE: Rotary = Rotary { scaling: RotaryScaling::Linear(2.0), ..Rotary::new(100.0) };
        // The first half of each head, scaled, by the length of each text.
        const HALF: Rotary = Rotary { part: 0.5, scaling: LONG, ..Rotary::new(100.0) };
        const LONG: RotaryScaling = RotaryScaling::LongRope(LongRope {
            short: [1.0; PAIRS],
            long: [3.0; PAIRS],
            attention_factor: 1.5,
            positions: 4,
        });
        let all = [shape.rows(), shape.qkv_width()];
        const NEIGHBOURS: Rotary = Rotary { part: 0.5, interleaved: true, ..WHOLE };
        const GROWTH: QueryGrowth = QueryGrowth { beta: 0.5, positions: 3 };
        const GROWING: Rotary = Rotary { growth: Some(GROWTH), ..WHOLE };
        const PROPORTIONAL: Rotary =
            Rotary { part: 0.5, scaling: RotaryScaling::Proportional(2.0), ..WHOLE };
        for rotary in [&WHOLE, &HALF, &NEIGHBOURS, &GROWING, &PROPORTIONAL] {
            for inverse in [false, true] {
                case!(self.rotate, |p| Rotate { qkv: p.input(all), rotary, shape, inverse });
            }
        }
    }

    fn of_regrouped_heads(&mut self, shape: AttentionShape<'c>) {
        let [heads, _, head_size] = shape.sizes();
        let linear = LinearHeads {
            key_heads: heads,
            value_heads: 3 * heads,
            key_size: head_size,
            value_size: head_size + 1,
            taps: 4,
        };
        let of_heads = (ColumnGroups::of_heads(heads, head_size), 3 * shape.width());
        let of_linear = (ColumnGroups::of_linear_attention(linear), linear.projected());
        for (groups, columns) in [of_heads, of_linear] {
            let all = [shape.rows(), columns];
            for back in [false, true] {
                case!(self.regroup_columns, |p| RegroupColumns {
                    y: p.output(all),
                    x: p.input(all),
                    groups,
                    back,
                });
            }
        }
    }

    fn of_head_norms(&mut self, shape: AttentionShape<'c>) {
        for values in [HeadValues::Plain, HeadValues::Normed, HeadValues::Keys] {
            self.of_head_norms_with(shape, QkNorm::ByHead, values);
        }
        self.of_head_norms_with(shape, QkNorm::Joint, HeadValues::Plain);
        self.of_head_norms_with(shape, QkNorm::LayerNorm, HeadValues::Plain);
    }

    fn of_head_norms_with(&mut self, shape: AttentionShape<'c>, norm: QkNorm, values: HeadValues) {
        let all = [shape.rows(), shape.qkv_width()];
        let read = [shape.rows(), values.input_width(&shape)];
        let parts = norm.parts(shape.sizes());
        let QueryKey { query, key } = norm.scales(&parts);
        let statistics = [shape.rows(), parts.normed(values) * norm.statistics()];
        case!(self.head_norm, |p| HeadNorm {
            y: p.output(all),
            statistics: p.floats_output(statistics),
            x: p.input(read),
            gamma: QueryKey { query: p.about(query, 1.0), key: p.about(key, 1.0) },
            gamma_offset: 1.0,
            epsilon: 1e-5,
            norm,
            values,
            shape,
        });
        case!(self.head_norm_backward, |p, scratch| HeadNormBackward {
            dx: p.input(all),
            dgamma: QueryKey { query: p.floats_output(query), key: p.floats_output(key) },
            x: p.input(read),
            statistics: p.floats(statistics, 1.5),
            gamma: QueryKey { query: p.about(query, 1.0), key: p.about(key, 1.0) },
            gamma_offset: 1.0,
            norm,
            values,
            shape,
            accumulate: false,
        });
    }

    fn of_kv_copies(&mut self, shape: AttentionShape<'c>) {
        let r = shape.rows();
        case!(self.write_kv, |p| WriteKv {
            kv: p.output([r, shape.kv_width()]),
            qkv: p.input([r, shape.qkv_width()]),
            shape,
        });
        case!(self.read_kv, |p| ReadKv {
            qkv: p.input([r, shape.qkv_width()]),
            kv: p.floats([r, shape.kv_width()], 0.0),
            shape,
        });
    }

    fn of_sinks(&mut self, shape: AttentionShape<'c>) {
        let r = shape.rows();
        case!(self.sink, |p| Sink {
            y: p.input([r, shape.width()]),
            lse: p.floats([r, shape.heads], 0.0),
            sinks: p.input([1, shape.heads]),
            shape,
        });
        for accumulate in [false, true] {
            case!(self.sink_backward, |p| SinkBackward {
                dsinks: p.gradient([1, shape.heads], accumulate),
                dy: p.input([r, shape.width()]),
                y: p.input([r, shape.width()]),
                lse: p.floats([r, shape.heads], 1.0),
                sinks: p.input([1, shape.heads]),
                shape,
                accumulate,
            });
        }
    }

    fn of_cached_attention(&mut self, shape: AttentionShape<'c>) {
        let rows = shape.rows();
        let sequences = self.batch.sequences();
        let cached = self.batch.metadata().cached;
        let room = cached.iter().max().copied().unwrap_or(0) + 1;
        case!(self.cached_attention, |p| CachedAttention {
            y: p.output([rows, shape.width()]),
            lse: p.floats_output([rows, shape.heads]),
            qkv: p.input([rows, shape.qkv_width()]),
            cache: p.input([sequences * room, shape.kv_width()]),
            shape,
        });
    }

    fn of_attention(&mut self, shape: AttentionShape<'c>) {
        let r = shape.rows();
        let outputs = [r, shape.width()];
        let inputs = [r, shape.qkv_width()];
        case!(self.attention, |p| Attention {
            y: p.output(outputs),
            lse: p.floats_output([r, shape.heads]),
            qkv: p.input(inputs),
            kv: None,
            shape,
        });
        self.case("attention_backward", |p| {
            let y = p.output(outputs);
            let lse = p.floats_output([r, shape.heads]);
            let dqkv = p.output(inputs);
            let dy = p.input(outputs);
            let qkv = p.input(inputs);
            let op = AttentionBackward { dqkv, chunk_kv: None, dy, y, lse, qkv, shape };
            move |k, scratch| {
                k.attention(&Attention { y, lse, qkv, kv: None, shape });
                k.attention_backward(&op, scratch);
            }
        });
    }

    /// Cases of a chunk behind other positions of its sequence.
    pub(in super::super) fn of_chunks(&mut self) {
        for heads in [[4, 2, 6], [2, 1, 64], [2, 1, 128]] {
            let shape = self.attention(heads);
            [false, true].into_iter().for_each(|accumulate| self.of_chunk(shape, 0, accumulate));
        }
    }

    /// A case of a chunk behind a tile of keys, which its window does not reach.
    pub(in super::super) fn of_windowed_chunk(&mut self) {
        for heads in [[4, 2, 6], [2, 1, 64], [2, 1, 128]] {
            let shape = AttentionShape { window: Some(40), ..self.attention(heads) };
            self.of_chunk(shape, 128, true);
        }
    }

    fn of_chunk(&mut self, shape: AttentionShape<'c>, first_kept: usize, accumulate: bool) {
        let r = shape.rows();
        let outputs = [r, shape.width()];
        let inputs = [r, shape.qkv_width()];
        let all = [self.batch.same_positions_before() + r - first_kept, shape.kv_width()];
        self.case("attention_backward of a chunk", |p| {
            let y = p.output(outputs);
            let lse = p.floats_output([r, shape.heads]);
            let dqkv = p.input(inputs);
            let dy = p.input(outputs);
            let qkv = p.input(inputs);
            let kv = p.input(all);
            let dkv = p.gradient(all, accumulate);
            let chunk_kv = Some(ChunkKv { kv, dkv, accumulate });
            let op = AttentionBackward { dqkv, chunk_kv, dy, y, lse, qkv, shape };
            move |k, scratch| {
                k.attention(&Attention { y, lse, qkv, kv: Some(kv), shape });
                k.attention_backward(&op, scratch);
            }
        });
    }
}
