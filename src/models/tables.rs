//! The tables whose rows the host gathers for tokens, and how they are cut into tiles: blocks of
//! the embedding, and of a head.

use std::ops::Range;

use super::layer::{Init, Kind, Tensor};
use super::shape::Shape;

/// Rows of the vocabulary that make one block: of the embedding, of the head, or of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The first row.
    pub first: usize,
    /// The number of rows.
    pub rows: usize,
}

/// A block of the embedding: a tile of a table, and where its rows stand among what the host
/// gathers for a token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TableTile {
    pub(crate) tile: Tile,
    pub(crate) columns: Range<usize>,
    /// The factor of its rows.
    pub(crate) scale: f32,
    /// True for a tile of the table of tokens.
    pub(crate) is_of_tokens: bool,
}

impl Tile {
    /// The tensors of a tile of a vocabulary, which a head has, too, if it `is_head`.
    pub(super) fn tensors(&self, name: &str, shape: &Shape, is_head: bool) -> Vec<Tensor> {
        let init = Init::Normal(shape.initializer_range);
        let rows = vec![self.rows, shape.embedding_width()];
        let mut all = vec![Tensor::new(name, rows, Kind::Table, init)];
        if is_head && shape.masked_head() && shape.token_bias {
            let rows = vec![self.rows];
            all.push(Tensor::new(shape.head_bias(), rows, Kind::Bias, Init::Zeros));
        }
        all
    }
}

impl TableTile {
    /// The tensors of the block.
    pub(super) fn tensors(&self, shape: &Shape) -> Vec<Tensor> {
        if self.is_of_tokens {
            let is_head = shape.tied && shape.scores_vocabulary();
            return self.tile.tensors(shape.names.embedding, shape, is_head);
        }
        let rows = vec![self.tile.rows, self.columns.len()];
        let init = Init::Normal(shape.initializer_range);
        vec![Tensor::new(shape.names.inputs.table, rows, Kind::Table, init)]
    }
}

/// The least bytes of a vocabulary tile: smaller transfers do not use the whole rate of a link.
const TILE_BYTES: usize = 4 << 20;

/// Cuts a table of this many rows and columns by shape: a tile is as large as a block, or 4 MiB if
/// that is more.
pub(super) fn tiles([all, width]: [usize; 2], elements: usize) -> Vec<Tile> {
    let elements = elements.max(TILE_BYTES / size_of::<f32>());
    let rows = (elements / width).clamp(1, all);
    let tile = |first| Tile { first, rows: rows.min(all - first) };
    (0..all).step_by(rows).map(tile).collect()
}

/// The tiles of the tables whose rows the host gathers.
pub(super) fn tables(shape: &Shape, tiles_of_tokens: &[Tile], elements: usize) -> Vec<TableTile> {
    let width = shape.embedding_width();
    let of_tokens = tiles_of_tokens.iter().map(|&tile| TableTile {
        tile,
        columns: 0..width,
        scale: shape.embedding_scale,
        is_of_tokens: true,
    });
    let of_inputs = shape.block_inputs.into_iter().flat_map(|inputs| {
        let columns = width..shape.gathered_width();
        let all = tiles([inputs.vocabulary, columns.len()], elements).into_iter();
        let scale = (inputs.channels as f64).sqrt() as f32;
        all.map(move |tile| TableTile {
            tile,
            columns: columns.clone(),
            scale,
            is_of_tokens: false,
        })
    });
    of_tokens.chain(of_inputs).collect()
}
