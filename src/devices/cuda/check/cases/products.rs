//! Cases of products, with weights that are trained or frozen, and of columns of their outputs.

use super::Cases;
use crate::kernels::{
    ActivateBackward, Activation, AddColumns, CopyColumns, Linear, LinearBackward, TakeColumns,
};

impl Cases<'_> {
    pub(in super::super) fn of_products(&mut self) {
        self.of_product([7, 5], false);
        self.of_product([36, 20], true);
        self.of_frozen_products();
        [None, Some(false), Some(true)].into_iter().for_each(|bias| self.of_activated(bias));
    }

    /// Cases of a product and the activation function behind it. `bias`: whether its gradient is
    /// added to; `None`: there is none.
    fn of_activated(&mut self, bias: Option<bool>) {
        let r = self.batch.rows();
        let activation = Activation::GeluTanh;
        self.case("activate_linear_backward", |p| {
            let dy = p.input([r, 20]);
            let activate = ActivateBackward { dx: dy, x: p.input([r, 20]), activation };
            let accumulate = bias.unwrap_or(false);
            let op = LinearBackward {
                dx: p.output([r, 12]),
                dw: Some(p.gradient([12, 20], accumulate)),
                dbias: bias.map(|accumulate| p.gradient([1, 20], accumulate)),
                dy,
                x: p.input([r, 12]),
                w: p.input([12, 20]),
                transposed: false,
                accumulate,
            };
            move |k, scratch| k.activate_linear_backward(&activate, &op, scratch)
        });
    }

    /// Cases of products of many tiles.
    pub(in super::super) fn of_large_products(&mut self) {
        // An emulated device takes seconds for the products of a GPU.
        let sizes = if cfg!(test) { [144, 80] } else { [512, 384] };
        [false, true].into_iter().for_each(|transposed| self.of_product(sizes, transposed));
    }

    fn of_product(&mut self, [inputs, outputs]: [usize; 2], transposed: bool) {
        let r = self.batch.rows();
        let weights = if transposed { [outputs, inputs] } else { [inputs, outputs] };
        case!(self.linear, |p| Linear {
            y: p.output([r, outputs]),
            x: p.input([r, inputs]),
            w: p.input(weights),
            bias: Some(p.input([1, outputs])),
            transposed,
        });
        case!(self.linear, |p| Linear {
            y: p.floats_output([r, outputs]),
            x: p.input([r, inputs]),
            w: p.input(weights),
            bias: Some(p.input([1, outputs])),
            transposed,
        });
        for accumulate in [false, true] {
            case!(self.linear_backward, |p, scratch| LinearBackward {
                dx: p.output([r, inputs]),
                dw: Some(p.gradient(weights, accumulate)),
                dbias: Some(p.gradient([1, outputs], accumulate)),
                dy: p.input([r, outputs]),
                x: p.input([r, inputs]),
                w: p.input(weights),
                transposed,
                accumulate,
            });
        }
    }

    /// Cases of products with frozen weights.
    fn of_frozen_products(&mut self) {
        let r = self.batch.rows();
        case!(self.linear_backward, |p, scratch| LinearBackward {
            dx: p.output([r, 12]),
            dw: None,
            dbias: None,
            dy: p.input([r, 9]),
            x: p.input([r, 12]),
            w: p.input([9, 12]),
            transposed: true,
            accumulate: false,
        });
        case!(self.linear_backward, |p, scratch| LinearBackward {
            dx: p.floats_output([r, 12]),
            dw: None,
            dbias: None,
            dy: p.input([r, 9]),
            x: p.input([r, 12]),
            w: p.input([9, 12]),
            transposed: true,
            accumulate: false,
        });
    }

    pub(super) fn of_columns(&mut self) {
        let r = self.batch.rows();
        let first = 3;
        let scale = 0.75;
        for (all, some) in [(9, 5), (1100, 1030)] {
            case!(self.add_columns, |p| AddColumns {
                y: p.input([r, all]),
                x: p.input([r, some]),
                first,
                scale,
            });
            case!(self.add_columns, |p| AddColumns {
                y: p.floats([r, all], 0.0),
                x: p.floats([r, some], 0.0),
                first,
                scale,
            });
            case!(self.copy_columns, |p| CopyColumns {
                y: p.input([r, all]),
                x: p.input([r, some]),
                to: first,
                from: 1,
                columns: some - 2,
            });
            case!(self.copy_columns, |p| CopyColumns {
                y: p.floats([r, some], 0.0),
                x: p.floats([r, all], 0.0),
                to: 1,
                from: first,
                columns: some - 1,
            });
            case!(self.take_columns, |p| TakeColumns {
                y: p.output([r, some]),
                x: p.input([r, all]),
                first,
                scale,
            });
        }
    }
}
