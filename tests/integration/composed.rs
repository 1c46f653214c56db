//! Composed layers, whose backward is derived: compared with finite differences, and with a block
//! whose backward is written by hand.

use l2l::data::Batches;
use l2l::kernels::{Activation, Rotary, Rows};
use l2l::models::{
    Composed, Derived, Final, Heads, Init, Kind, Layer, Model, Operations, Shape, Stem, Tensor,
    TransformerBlock, Value,
};
use l2l::testing::check_gradients;
use l2l::{Config, Trainer, shape_of};

fn tensor(name: &str, shape: &[usize], kind: Kind) -> Tensor {
    let init = Init::Normal(0.3);
    Tensor::new(name, shape.to_vec(), kind, init)
}

const C: usize = 6;

/// A layer with every operation, a value that three operations read, a tensor that two use, one
/// that none uses, and a value that no result depends on.
struct Everything;

impl Composed for Everything {
    fn tensors(&self) -> Vec<Tensor> {
        vec![
            tensor("gamma", &[C], Kind::Norm),
            tensor("beta", &[C], Kind::Norm),
            tensor("square", &[C, C], Kind::Weight),
            tensor("bias", &[C], Kind::Bias),
            tensor("qkv", &[C, 16], Kind::Weight),
            tensor("wide", &[2 * C, 8], Kind::Weight),
            tensor("unused", &[3], Kind::Weight),
        ]
    }

    fn index(&self) -> u32 {
        3
    }

    fn channels(&self) -> usize {
        C
    }

    fn compose(&self, ops: &mut Operations<'_>, x: Value) -> Value {
        let heads = Heads {
            heads: 2,
            kv_heads: 1,
            head_size: 4,
            causal: true,
            window: Some(4),
            rotary: Some(Rotary::new(100.0)),
            dropout: 0.2,
        };
        let normed = ops.norm(x, 0, Some(1), 1e-5, false);
        let square = ops.linear(normed, 2, Some(3), false);
        let bent = ops.activate(square, Activation::Tanh);
        let again = ops.linear(bent, 2, None, false);
        let saved = ops.dropout(again, 0.3);
        let _nowhere = ops.activate(saved, Activation::Relu);
        let twice = ops.add(saved, saved);
        let qkv = ops.linear(twice, 4, None, false);
        let mixed = ops.attention(qkv, heads);
        let wide = ops.linear(mixed, 5, None, true);
        let gated = ops.gate(wide, Activation::Silu);
        let sum = ops.add(gated, normed);
        ops.add(sum, x)
    }
}

#[test]
fn a_derived_backward_is_the_gradient() {
    check_gradients(&Derived(Everything), C, Rows { sequences: 2, positions: 7 }).expect("it is");
}

/// A block of GPT-2, composed of operations.
struct Composition(TransformerBlock);

impl Composed for Composition {
    fn tensors(&self) -> Vec<Tensor> {
        self.0.tensors()
    }

    fn index(&self) -> u32 {
        self.0.index
    }

    fn channels(&self) -> usize {
        self.0.shape.hidden
    }

    fn compose(&self, ops: &mut Operations<'_>, x: Value) -> Value {
        let Shape {
            heads,
            kv_heads,
            head_size,
            causal,
            norm_epsilon,
            activation,
            dropout,
            transposed,
            ..
        } = self.0.shape;
        let of_heads = Heads {
            heads,
            kv_heads,
            head_size,
            causal,
            window: None,
            rotary: None,
            dropout: dropout.attention,
        };
        let normed = ops.norm(x, 0, Some(1), norm_epsilon, false);
        let qkv = ops.linear(normed, 2, Some(3), transposed);
        let mixed = ops.attention(qkv, of_heads);
        let projected = ops.linear(mixed, 4, Some(5), transposed);
        let saved = ops.dropout(projected, dropout.projection);
        let middle = ops.add(x, saved);
        let normed = ops.norm(middle, 6, Some(7), norm_epsilon, false);
        let wide = ops.linear(normed, 8, Some(9), transposed);
        let bent = ops.activate(wide, activation);
        let narrow = ops.linear(bent, 10, Some(11), transposed);
        let saved = ops.dropout(narrow, dropout.feed_forward);
        ops.add(middle, saved)
    }
}

/// Masks and sums are the same. Only the order in which a branch's gradient is rounded differs.
#[tokio::test]
async fn a_composed_block_trains_as_the_one_by_hand() {
    let mut config = Config::default();
    config.data.train = "random".into();
    config.model.layers = Some(2);
    config.model.hidden = Some(24);
    config.model.heads = Some(3);
    config.model.vocabulary = Some(51);
    config.model.dropout = Some(0.1);
    config.data.sequence_length = Some(9);
    config.step.batch = 5;
    config.step.micro_batch = 2;
    let shape = shape_of(&config).expect("a shape of ours");
    let mut losses = Vec::new();
    let mut told = Vec::new();
    for composes in [false, true] {
        let block = |number: usize| TransformerBlock::new(2 + number as u32, number, shape);
        let layer = |number| -> Box<dyn Layer> {
            if composes {
                Box::new(Derived(Composition(block(number))))
            } else {
                Box::new(block(number))
            }
        };
        told.push((layer(0).kv_width(), layer(0).attention_channels(), layer(0).products()));
        let stack: Vec<Box<dyn Layer>> = vec![
            Box::new(Stem { index: 1, shape }),
            layer(0),
            layer(1),
            Box::new(Final::new(shape)),
        ];
        let mut batches = Batches::open(&config).expect("random data");
        let builder = Trainer::builder(config.clone()).model(Model::of(shape, stack));
        let mut trainer = builder.start().await.expect("a model of ours");
        let mut found = Vec::new();
        for _ in 0..4 {
            let batch = batches.next().await.expect("random data");
            let report = trainer.step(batch).await.expect("a step");
            found.push((report.loss, report.grad_norm));
        }
        trainer.stop().await.expect("an end");
        losses.push(found);
    }
    assert_eq!(told[0], told[1]);
    for (hand, derived) in losses[0].iter().zip(&losses[1]) {
        assert!((hand.0 - derived.0).abs() < 2e-6 * hand.0, "{hand:?} {derived:?}");
        assert!((hand.1 - derived.1).abs() < 2e-5 * hand.1, "{hand:?} {derived:?}");
    }
}
