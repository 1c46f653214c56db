//! How kernels are launched: the types of arguments, and the shapes of grids. The arguments are
//! those that `kernels/*.cu` declare; every launch is compared with the text.

use std::cell::RefCell;
use std::sync::Arc;

use l2l_actors::BoxedError;

use super::chosen::Chosen;
use super::driver::{
    self, Address, Alignment, Argument, Driver, Kind, Launch, Place, Product, Stream,
};
use super::texts::Target;
use super::times::Times;
use super::ways::{Way, Ways};
use crate::kernels::{
    Activation, AttentionShape, Dropout, LinearHeads, LinearShape, PAIRS, RotaryTable,
};
use crate::tensor::Dtype;

impl Argument for Place {
    fn kind(&self) -> Kind {
        match (self.at, self.dtype) {
            (0, _) => Kind::Null,
            (_, Dtype::F32) => Kind::Floats,
            (_, Dtype::Bf16 | Dtype::F16) => Kind::Elements,
        }
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::bytes_of(&self.at)
    }
}

impl Argument for Address {
    fn kind(&self) -> Kind {
        if *self == NULL { Kind::Null } else { Kind::Pointer }
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::bytes_of(self)
    }
}

impl Argument for i32 {
    fn kind(&self) -> Kind {
        Kind::Int
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::bytes_of(self)
    }
}

impl Argument for i64 {
    fn kind(&self) -> Kind {
        Kind::Long
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::bytes_of(self)
    }
}

impl Argument for f32 {
    fn kind(&self) -> Kind {
        Kind::Float
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::bytes_of(self)
    }
}

/// A struct of the text, in words of four bytes.
#[derive(Clone, Copy)]
pub(super) struct Words<const N: usize> {
    pub(super) name: &'static str,
    pub(super) words: [u32; N],
}

impl<const N: usize> Argument for Words<N> {
    fn kind(&self) -> Kind {
        Kind::Of(self.name)
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }
}

/// The text's `Dropout`; all zero when nothing is dropped.
pub(super) fn dropout_words(dropout: Option<Dropout<'_>>) -> Words<7> {
    Words { name: "Dropout", words: dropout.map_or([0; 7], mask_words) }
}

/// The words of a mask, computed as on the CPU.
fn mask_words(dropout: Dropout<'_>) -> [u32; 7] {
    let Dropout { probability, seed, step, site, first_sequence, first_position, .. } = dropout;
    [
        seed as u32,
        (seed >> 32) as u32 ^ (step >> 32) as u32,
        first_sequence,
        first_position,
        site.wrapping_mul(0x9E37_79B1) ^ step as u32,
        (f64::from(probability) * 4_294_967_296.0) as u32,
        (1.0 / (1.0 - probability)).to_bits(),
    ]
}

/// The largest window that a text gets: more than any sequence has positions.
const MOST: usize = 1 << 30;

/// The text's `Attention`.
pub(super) fn attention_words(shape: &AttentionShape<'_>) -> Words<17> {
    attention_words_from(shape, 0)
}

/// The text's `Attention` for a chunk whose keys and values are there from a position on.
pub(super) fn attention_words_from(shape: &AttentionShape<'_>, first_kept: usize) -> Words<17> {
    let window = shape.window.map_or(0, |window| window.min(MOST));
    let words = [
        shape.batch.sequences(),
        shape.rows(),
        shape.batch.positions_before(0),
        shape.heads,
        shape.kv_heads,
        shape.head_size,
        if shape.causal { 1 } else { window },
        window,
        first_kept,
    ];
    let mut all = [0; 17];
    all[..9].copy_from_slice(&words.map(|word| u32::try_from(word).expect("sizes are checked")));
    all[9] = shape.score_scale().to_bits();
    all[10..].copy_from_slice(&shape.dropout.map_or([0; 7], mask_words));
    Words { name: "Attention", words: all }
}

/// The text's `Linear`.
pub(super) fn linear_words(shape: &LinearShape<'_>) -> Words<8> {
    let LinearHeads { key_heads, value_heads, key_size, value_size, taps } = shape.heads;
    let batch = &shape.batch;
    let before = batch.positions_before(0);
    let heads = [key_heads, value_heads, key_size, value_size, taps];
    let sizes = [batch.sequences(), batch.rows(), before].into_iter().chain(heads);
    let mut words = [0; 8];
    for (word, size) in words.iter_mut().zip(sizes) {
        *word = u32::try_from(size).expect("sizes are checked");
    }
    Words { name: "Linear", words }
}

/// The text's `Rotary`.
pub(super) fn rotary_words(table: &RotaryTable) -> Words<{ PAIRS + 6 }> {
    let RotaryTable { frequencies, pairs, distance, interleaved, growth, scale } = *table;
    let mut words = [0; PAIRS + 6];
    words[..PAIRS].copy_from_slice(&frequencies.map(f32::to_bits));
    let [beta, positions] =
        growth.map_or([0, 0], |growth| [growth.beta.to_bits(), growth.positions as u32]);
    let sizes = [pairs as u32, u32::from(interleaved), distance as u32];
    let [pairs, interleaved, distance] = sizes;
    let behind = [scale.to_bits(), pairs, interleaved, distance, beta, positions];
    words[PAIRS..].copy_from_slice(&behind);
    Words { name: "Rotary", words }
}

/// A size, as an `int` of the text.
pub(super) fn int(size: usize) -> i32 {
    i32::try_from(size).expect("sizes are checked")
}

/// The size of a whole tensor, as a `long long` of the text.
pub(super) fn long(size: usize) -> i64 {
    size as i64
}

/// The number that the text has for an activation function.
pub(super) fn activation_number(activation: Activation) -> i32 {
    match activation {
        Activation::GeluErf => 0,
        Activation::GeluTanh => 1,
        Activation::Silu => 2,
        Activation::Relu => 3,
        Activation::Tanh => 4,
    }
}

/// Channels or columns that one thread computes.
pub(super) const NEIGHBOURS: usize = 4;

/// Channels or columns of one thread that moves 16 bytes at a time.
pub(super) fn wide(dtype: Dtype) -> usize {
    16 / dtype.size()
}

/// Threads of a block that walks a row of `channels`, with `neighbours` a thread: the number that
/// the kernels' text expects.
fn threads(channels: usize, neighbours: usize) -> u32 {
    (32 * channels.div_ceil(32 * neighbours)).min(256) as u32
}

/// Rows of one partial sum. It is a constant, so that sums have the same order on all devices.
pub(super) const PART: usize = 64;

pub(super) fn parts_of(rows: usize) -> usize {
    rows.div_ceil(PART)
}

pub(super) const FLOAT: usize = size_of::<f32>();

pub(super) const NULL: Address = 0;

/// Rows and columns of a tile of our own product, as the text expects.
const TILE: usize = 16;

/// Launches on the compute stream. After the first error, nothing more is launched.
pub(super) struct Queue<'a> {
    driver: &'a Arc<dyn Driver>,
    /// The workspace of matrix products.
    workspace: Address,
    /// How products are computed.
    ways: &'a Ways,
    chosen: &'a Chosen,
    times: &'a Times,
    failed: RefCell<Option<BoxedError>>,
}

impl<'a> Queue<'a> {
    pub(super) fn new(
        driver: &'a Arc<dyn Driver>,
        workspace: Address,
        ways: &'a Ways,
        chosen: &'a Chosen,
        times: &'a Times,
    ) -> Queue<'a> {
        Queue { driver, workspace, ways, chosen, times, failed: RefCell::default() }
    }

    pub(super) fn target(&self) -> Target {
        self.driver.target()
    }

    pub(super) fn end(self) -> Result<(), BoxedError> {
        self.failed.into_inner().map_or(Ok(()), Err)
    }

    fn go(&self, work: impl FnOnce() -> Result<(), BoxedError>, what: &str) {
        if self.failed.borrow().is_none()
            && let Err(error) = work()
        {
            self.failed.borrow_mut().get_or_insert(format!("{what}: {error}").into());
        }
    }

    /// The workspace of matrix products, which other launches may use between products.
    pub(super) fn workspace(&self) -> Address {
        self.workspace
    }

    /// The floats at an address, for which it waits; zeros after an error.
    pub(super) fn read(&self, at: Address, floats: usize) -> Vec<f32> {
        let mut values = vec![0.0; floats];
        let read = || driver::read(self.driver, at, floats).map(|read| values = read);
        self.go(read, "copy");
        values
    }

    /// Launches a kernel on `grid` blocks of `block` threads.
    pub(super) fn launch(
        &self,
        kernel: &'static str,
        grid: [usize; 3],
        block: [u32; 3],
        shared: usize,
        arguments: &[&dyn Argument],
    ) {
        let grid = grid.map(|blocks| u32::try_from(blocks).expect("sizes are checked"));
        let shared = u32::try_from(shared).expect("a block has little");
        let launch = Launch { kernel, grid, block, shared, arguments };
        if !grid.contains(&0) {
            let go = || self.driver.launch(Stream::Compute, &launch);
            self.go(|| self.times.of(self.driver, kernel, go), kernel);
        }
    }

    /// Launches a kernel with a thread for each `of_thread` elements.
    pub(super) fn each(
        &self,
        kernel: &'static str,
        elements: usize,
        of_thread: usize,
        arguments: &[&dyn Argument],
    ) {
        let blocks = elements.div_ceil(256 * of_thread);
        self.launch(kernel, [blocks, 1, 1], [256, 1, 1], 0, arguments);
    }

    /// Launches a kernel with a block for each row. The block walks the whole row, and each thread
    /// has `neighbours` channels at a time.
    pub(super) fn rows(
        &self,
        kernel: &'static str,
        rows: usize,
        channels: usize,
        neighbours: usize,
        arguments: &[&dyn Argument],
    ) {
        self.launch(kernel, [rows, 1, 1], [threads(channels, neighbours), 1, 1], 0, arguments);
    }

    /// Launches a kernel with blocks for each row, or run of rows, that share its channels.
    pub(super) fn columns(
        &self,
        kernel: &'static str,
        [rows, layers]: [usize; 2],
        channels: usize,
        arguments: &[&dyn Argument],
    ) {
        self.wide_columns(kernel, [rows, layers], channels, NEIGHBOURS, arguments);
    }

    /// Launches a kernel as [`columns`](Queue::columns) does, with `neighbours` channels a thread.
    pub(super) fn wide_columns(
        &self,
        kernel: &'static str,
        [rows, layers]: [usize; 2],
        channels: usize,
        neighbours: usize,
        arguments: &[&dyn Argument],
    ) {
        let grid = [rows, channels.div_ceil(256 * neighbours), layers];
        self.launch(kernel, grid, [threads(channels, neighbours), 1, 1], 0, arguments);
    }

    /// c (+)= a b + bias, in the fastest way that there is.
    pub(super) fn product(&self, product: &Product) {
        let key = product.key();
        let refused = || Err(format!("cuBLASLt has no algorithm for {key}").into());
        let compute = || {
            if let Some(known) = self.ways.known(&key) {
                return if self.product_in(known, product)? { Ok(()) } else { refused() };
            }
            for way in Way::ALL {
                if self.product_in(way, product)? {
                    self.ways.learn(key, way);
                    return Ok(());
                }
            }
            refused()
        };
        self.go(compute, "product");
    }

    /// Computes a product in a way. Returns false if the library cannot; then nothing was done.
    fn product_in(&self, way: Way, product: &Product) -> Result<bool, BoxedError> {
        let plain = Product { bias: None, ..*product };
        let (of_library, relies_on) = match way {
            Way::Library => (product, Alignment::OfRows),
            Way::ThenBias => (&plain, Alignment::OfRows),
            Way::Unaligned => (&plain, Alignment::OfElements),
            Way::Own => {
                self.own_product(product);
                return Ok(true);
            }
        };
        let chosen = self.chosen;
        let workspace = self.workspace;
        chosen.time(self.driver, of_library, relies_on, workspace)?;
        let mut is_done = false;
        self.times.of(self.driver, "product", || {
            is_done = chosen.run(&**self.driver, of_library, relies_on, workspace)?;
            Ok(())
        })?;
        let Product { rows, columns, c, stride, bias: Some(bias), .. } = *product else {
            return Ok(is_done);
        };
        if is_done && of_library.bias.is_none() {
            let arguments: [&dyn Argument; 5] =
                [&c, &bias, &int(rows), &int(columns), &int(stride)];
            self.columns("add_bias", [rows, 1], columns, &arguments);
        }
        Ok(is_done)
    }

    /// c (+)= a b + bias, by a kernel of our own.
    fn own_product(&self, product: &Product) {
        let Product { rows, inner, columns, a, b, c, stride, bias, accumulate } = *product;
        let kernel = match (c.dtype, a.at.dtype) {
            (to, from) if to == from => "product",
            _ => "product_to_floats",
        };
        let bias = bias.unwrap_or(Place::NULL);
        let [r, k, n] = [rows, inner, columns].map(int);
        let [of_a, of_b, of_c] = [a.stride, b.stride, stride].map(int);
        let [ta, tb, accumulate] = [a.transposed, b.transposed, accumulate].map(i32::from);
        let arguments: [&dyn Argument; 13] =
            [&c, &a.at, &b.at, &bias, &r, &k, &n, &of_c, &of_a, &of_b, &ta, &tb, &accumulate];
        let grid = [columns.div_ceil(TILE), rows.div_ceil(TILE), 1];
        self.launch(kernel, grid, [(TILE * TILE) as u32, 1, 1], 0, &arguments);
    }

    pub(super) fn copy(&self, to: Place, from: Place, len: usize) {
        assert_eq!(to.dtype, from.dtype, "a copy casts nothing");
        let bytes = len * to.dtype.size();
        let go = || self.driver.copy(Stream::Compute, to.at, from.at, bytes);
        self.go(|| self.times.of(self.driver, "copy", go), "copy");
    }

    /// Makes words zero.
    pub(super) fn clear_words(&self, at: Address, words: usize) {
        let floats = Place { at, dtype: Dtype::F32 };
        self.each("clear_floats", words, NEIGHBOURS, &[&floats, &long(words)]);
    }

    /// out (+)= the sum of `count` parts, `stride` apart.
    pub(super) fn fold(
        &self,
        out: Place,
        parts: Place,
        [count, stride, length]: [usize; 3],
        accumulate: bool,
    ) {
        let len = int(length);
        let accumulate = i32::from(accumulate);
        self.each(
            "fold",
            length,
            1,
            &[&out, &parts, &int(count), &long(stride), &len, &accumulate],
        );
    }
}
