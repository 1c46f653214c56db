//! The tensors of a block, and their views.

use super::TransformerBlock;
use crate::kernels::QueryKey;
use crate::models::adapters::AdaptedModule;
use crate::models::layer::{Init, Kind, Tensor};
use crate::models::low_rank::Adapter;
use crate::models::norms::Affine;
use crate::models::shape::Shape;
use crate::tensor::View;

/// A product, with the adapters of its modules.
pub(super) struct Product<V> {
    pub(super) affine: Affine<V>,
    pub(super) adapters: Vec<Adapter<V>>,
}

/// Views of a block's tensors, or of their gradients.
pub(super) struct Weights<V> {
    pub(super) norm1: Affine<V>,
    pub(super) qkv: Product<V>,
    pub(super) qk_norm: Option<[V; 2]>,
    pub(super) projection: Product<V>,
    pub(super) norm2: Affine<V>,
    pub(super) up: Product<V>,
    pub(super) down: Product<V>,
    /// The norms of the outputs of attention and of the feed-forward.
    pub(super) branch_norms: Option<[Affine<V>; 2]>,
}

/// The gradients of a block's tensors: `None` for a frozen tensor.
pub(super) type Gradients = Weights<Option<View>>;

impl Weights<View> {
    pub(super) fn qk_norm(&self) -> Option<QueryKey> {
        self.qk_norm.map(|[query, key]| QueryKey { query, key })
    }
}

/// Modules with the same input: their weights lie one behind the other and make one product.
pub(super) struct Modules {
    /// The name and the outputs of each.
    pub(super) named: Vec<(String, usize)>,
    pub(super) inputs: usize,
    has_bias: bool,
    init: Init,
}

impl TransformerBlock {
    fn name(&self, name: &str) -> String {
        name.replace("{}", &self.number.to_string())
    }

    /// The modules of the block's products: queries, keys and values; attention's projection; the
    /// two of the feed-forward.
    pub(super) fn modules(&self) -> [Modules; 4] {
        let Shape { names, hidden, heads, kv_heads, head_size: d, .. } = self.shape;
        let Shape { initializer_range, layers, biases, intermediate, .. } = self.shape;
        let weight = Init::Normal(initializer_range);
        // Projections onto the residual stream begin smaller: each block adds two of them.
        let onto = Init::Normal(initializer_range / (2.0 * layers as f32).sqrt());
        let qkv: Vec<(&str, usize)> = match names.qkv {
            [fused] => vec![(*fused, self.shape.qkv())],
            three => three.iter().copied().zip([heads * d, kv_heads * d, kv_heads * d]).collect(),
        };
        let up = match names.up {
            [one] => vec![(*one, self.shape.up())],
            both => both.iter().map(|name| (*name, intermediate)).collect(),
        };
        let modules = |modules: Vec<(&str, usize)>, inputs, has_bias, init| {
            let modules = modules.into_iter().map(|(name, outputs)| (self.name(name), outputs));
            Modules { named: modules.collect(), inputs, has_bias, init }
        };
        [
            modules(qkv, hidden, biases[0], weight),
            modules(vec![(names.projection, hidden)], heads * d, biases[1], onto),
            modules(up, hidden, biases[2], weight),
            modules(vec![(names.down, hidden)], intermediate, biases[2], onto),
        ]
    }

    /// Name, inputs and outputs of each module of the block's products.
    pub(crate) fn linear_modules(&self) -> Vec<(String, usize, usize)> {
        let of = |Modules { named, inputs, .. }: Modules| {
            named.into_iter().map(move |(name, outputs)| (name, inputs, outputs))
        };
        self.modules().into_iter().flat_map(of).collect()
    }

    fn norm_tensors(&self, name: &str, len: usize, has_shift: bool) -> Vec<Tensor> {
        self.shape.norm_tensors(&self.name(name), len, has_shift)
    }

    fn product_tensors(&self, modules: &Modules) -> Vec<Tensor> {
        let Modules { ref named, inputs, has_bias, init } = *modules;
        let is_transposed = self.shape.transposed;
        let tensor = |index: usize, end: &str, shape, kind, init| {
            let name = format!("{}.{end}", named[index].0);
            Tensor { joined: index > 0, ..Tensor::new(name, shape, kind, init) }
        };
        let weight = |(index, &(_, n)): (usize, &(String, usize))| {
            let shape = if is_transposed { vec![n, inputs] } else { vec![inputs, n] };
            tensor(index, "weight", shape, Kind::Weight, init)
        };
        let bias = |(index, &(_, n)): (usize, &(String, usize))| {
            tensor(index, "bias", vec![n], Kind::Bias, Init::Zeros)
        };
        let biases = named.iter().enumerate().filter(|_| has_bias).map(bias);
        named.iter().enumerate().map(weight).chain(biases).collect()
    }

    /// The tensors of the modules' adapters, in order.
    fn adapter_tensors(&self) -> impl Iterator<Item = Tensor> {
        let adapters = self.adapters.clone().into_iter();
        adapters.flat_map(|adapters| {
            let tensors = |modules: &Modules| -> Vec<Tensor> {
                let of = |(name, n): &(String, usize)| {
                    Some(adapters.of(name)?.tensors(modules.inputs, *n))
                };
                modules.named.iter().filter_map(of).flatten().collect()
            };
            self.modules().iter().flat_map(tensors).collect::<Vec<Tensor>>()
        })
    }

    pub(super) fn list_tensors(&self) -> Vec<Tensor> {
        let Shape { names, hidden: c, head_size: d, rms_norm, qk_norm, .. } = self.shape;
        let [qkv, projection, up, down] = self.modules();
        let mut all = self.norm_tensors(names.norm1, c, !rms_norm);
        all.extend(self.product_tensors(&qkv));
        all.extend(self.product_tensors(&projection));
        all.extend(self.norm_tensors(names.norm2, c, !rms_norm));
        all.extend(self.product_tensors(&up));
        all.extend(self.product_tensors(&down));
        let of_branches = names.branch_norms.iter().filter(|_| self.shape.branch_norm);
        all.extend(of_branches.flat_map(|name| self.norm_tensors(name, c, !rms_norm)));
        let of_heads = names.qk_norm.iter().filter(|_| qk_norm);
        all.extend(of_heads.flat_map(|name| self.norm_tensors(name, d, false)));
        all.extend(self.adapter_tensors());
        all
    }

    /// Sorts the views of the tensors, or of their gradients, by name.
    pub(super) fn weights<V: Copy>(&self, views: &[V]) -> Weights<V> {
        let Shape { rms_norm, qk_norm, biases, .. } = self.shape;
        let mut views = views.iter().copied();
        let mut next = || views.next().expect("as `list_tensors` lists them");
        let mut affine = |has_bias: bool| Affine { weight: next(), bias: has_bias.then(&mut next) };
        let norm1 = affine(!rms_norm);
        let qkv = affine(biases[0]);
        let projection = affine(biases[1]);
        let norm2 = affine(!rms_norm);
        let up = affine(biases[2]);
        let down = affine(biases[2]);
        let branch_norms = self.shape.branch_norm.then(|| [(); 2].map(|()| affine(!rms_norm)));
        let qk_norm = qk_norm.then(|| [affine(false).weight, affine(false).weight]);
        let mut site = 0;
        let mut product = |affine: Affine<V>, modules: Modules| {
            let mut adapters = Vec::new();
            let mut first = 0;
            for (name, outputs) in modules.named {
                let adapter = self.adapters.as_ref().and_then(|adapters| adapters.of(&name));
                if let Some(&AdaptedModule { rank, scale, .. }) = adapter {
                    let a = next();
                    let b = next();
                    adapters.push(Adapter { a, b, rank, scale, first, outputs, site });
                }
                (first, site) = (first + outputs, site + 1);
            }
            Product { affine, adapters }
        };
        let [of_qkv, of_projection, of_up, of_down] = self.modules();
        Weights {
            norm1,
            qkv: product(qkv, of_qkv),
            qk_norm,
            projection: product(projection, of_projection),
            norm2,
            up: product(up, of_up),
            down: product(down, of_down),
            branch_norms,
        }
    }
}
