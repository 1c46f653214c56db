//! The tensors of a block, and their views.

use std::ops::Range;
use std::slice;

use super::TransformerBlock;
use super::input::InputTensors;
use super::linear::LinearTensors;
use crate::kernels::{HeadValues, Kernels, QueryKey};
use crate::models::adapters::AdaptedModule;
use crate::models::block_tensors::SlotWeight;
use crate::models::families::Names;
use crate::models::layer::{Init, Kind, Tensor};
use crate::models::low_rank::Adapter;
use crate::models::norms::Affine;
use crate::models::shape::{Experts, IdleExperts, NormPlaces, Shape};
use crate::tensor::{Scratch, View};

/// A product, with the adapters of its modules.
pub(super) struct Product<V> {
    pub(super) affine: Affine<V>,
    pub(super) adapters: Vec<Adapter<V>>,
    /// True when the weights are (outputs, inputs).
    pub(super) transposed: bool,
}

impl Product<Option<View>> {
    /// The gradient of the bias, if there is one.
    pub(super) fn bias(&self) -> Option<View> {
        self.affine.bias.flatten()
    }
}

/// A feed-forward: the product before its activation function, and the product behind it.
pub(super) struct Mlp<V> {
    pub(super) up: Product<V>,
    pub(super) down: Product<V>,
}

impl<V: Copy> Mlp<Option<V>> {
    /// The gradients of all tensors that are trained.
    pub(super) fn all(&self) -> impl Iterator<Item = V> {
        [&self.up, &self.down].into_iter().flat_map(|Product { affine, adapters, .. }| {
            let of_adapters = adapters.iter().flat_map(|one| [one.a, one.b]);
            [affine.weight, affine.bias.flatten()].into_iter().chain(of_adapters).flatten()
        })
    }
}

impl Mlp<SlotWeight<'_>> {
    /// True for an expert that may run beside others: its weights and adapters take no workspace,
    /// and it has no biases.
    pub(super) fn runs_beside_others(&self) -> bool {
        let is_ready = |weight: &SlotWeight<'_>| matches!(weight, SlotWeight::Ready(_));
        [&self.up, &self.down].into_iter().all(|Product { affine, adapters, .. }| {
            let mut of_adapters = adapters.iter().flat_map(|one| [&one.a, &one.b]);
            is_ready(&affine.weight) && affine.bias.is_none() && of_adapters.all(is_ready)
        })
    }

    /// The weights in the device's dtype.
    pub(super) fn ready(&self, k: &dyn Kernels, scratch: &Scratch<'_>) -> Mlp<View> {
        let ready = |weight: SlotWeight<'_>| weight.ready(k, scratch);
        let product = |one: &Product<SlotWeight<'_>>| {
            let Affine { weight, bias } = one.affine;
            let affine = Affine { weight: ready(weight), bias: bias.map(ready) };
            let adapter = |one: &Adapter<_>| one.with(ready(one.a), ready(one.b));
            let adapters = one.adapters.iter().map(adapter).collect();
            Product { affine, adapters, transposed: one.transposed }
        };
        Mlp { up: product(&self.up), down: product(&self.down) }
    }
}

/// The expert that all rows use, with the layer whose sigmoid multiplies its output.
pub(super) struct SharedExpert<V> {
    pub(super) mlp: Mlp<V>,
    pub(super) gate: V,
}

/// The router, and the experts among which it chooses.
pub(super) struct ExpertWeights<V, E> {
    pub(super) router: Affine<V>,
    pub(super) shared: Option<SharedExpert<V>>,
    pub(super) experts: Vec<Mlp<E>>,
}

/// What stands behind attention.
pub(super) enum FeedForward<V, E> {
    Dense(Mlp<V>),
    Experts(ExpertWeights<V, E>),
    /// A slice's is not beside its attention.
    Apart,
}

/// A block's tensors, or their gradients; `E` are those of experts.
pub(super) struct Tensors<V, E> {
    pub(super) norm1: Affine<V>,
    pub(super) qkv: Product<V>,
    pub(super) qk_norm: Option<[V; 2]>,
    pub(super) projection: Product<V>,
    pub(super) norm2: Affine<V>,
    pub(super) feed_forward: FeedForward<V, E>,
    /// The norms of the outputs of attention and of the feed-forward. Without norms of their
    /// inputs they are `norm1` and `norm2`.
    pub(super) branch_norms: Option<[Affine<V>; 2]>,
    /// The sinks of attention's heads.
    pub(super) sinks: Option<V>,
    /// The number that multiplies the block's output.
    pub(super) output_scalar: Option<V>,
    /// Those of linear attention, in place of attention.
    pub(super) linear: Option<LinearTensors<V>>,
    /// Those of the branch of the block's input.
    pub(super) input: Option<InputTensors<V>>,
}

/// Views of a block's weights. Those of an expert are dequantised when it has rows.
pub(super) type Weights<'a> = Tensors<View, SlotWeight<'a>>;

/// The gradients of a block's tensors: `None` for a frozen tensor.
pub(super) type Gradients = Tensors<Option<View>, Option<View>>;

impl Weights<'_> {
    pub(super) fn qk_norm(&self) -> Option<QueryKey> {
        self.qk_norm.map(|[query, key]| QueryKey { query, key })
    }
}

/// The names of a feed-forward's modules, and its channels.
struct MlpNames<'n> {
    up: &'n [&'n str],
    down: &'n str,
    channels: usize,
}

/// Modules with the same input: their weights lie one behind the other and make one product.
pub(super) struct Modules {
    /// The name and the outputs of each.
    pub(super) named: Vec<(String, usize)>,
    pub(super) inputs: usize,
    has_bias: bool,
    init: Init,
    /// True when files have one tensor for all experts of the block, whose matrices are (inputs,
    /// outputs).
    stacked: bool,
}

impl Modules {
    pub(super) fn names(&self) -> Vec<String> {
        self.named.iter().map(|(name, _)| name.clone()).collect()
    }
}

/// Takes the views of a block's tensors, one behind the other.
struct Next<'b, I> {
    block: &'b TransformerBlock,
    views: I,
    /// The number of modules that were passed, for dropout.
    site: u32,
}

impl<V: Copy, I: Iterator<Item = V>> Next<'_, I> {
    fn view(&mut self) -> V {
        self.views.next().expect("as `list_tensors` lists them")
    }

    fn affine(&mut self, has_bias: bool) -> Affine<V> {
        Affine { weight: self.view(), bias: has_bias.then(|| self.view()) }
    }

    /// The product of these modules, with their adapters, which are next.
    fn product(&mut self, affine: Affine<V>, modules: Modules) -> Product<V> {
        let mut adapters = Vec::new();
        let mut first = 0;
        for (name, outputs) in modules.named {
            let adapter = self.block.adapters.as_ref().and_then(|adapters| adapters.of(&name));
            if let Some(&AdaptedModule { rank, scale, .. }) = adapter {
                let a = self.view();
                let b = self.view();
                let site = self.site;
                adapters.push(Adapter { a, b, rank, scale, first, outputs, site });
            }
            (first, self.site) = (first + outputs, self.site + 1);
        }
        let transposed = self.block.shape.transposed && !modules.stacked;
        Product { affine, adapters, transposed }
    }

    fn mlp(&mut self, [up, down]: [Affine<V>; 2], modules: [Modules; 2]) -> Mlp<V> {
        let [of_up, of_down] = modules;
        Mlp { up: self.product(up, of_up), down: self.product(down, of_down) }
    }
}

impl TransformerBlock {
    /// The block's experts, if it has any.
    pub(super) fn experts(&self) -> Option<Experts> {
        self.shape.experts.filter(|experts| experts.is_of(self.number))
    }

    pub(super) fn name(&self, name: &str) -> String {
        name.replacen("{}", &self.number.to_string(), 1)
    }

    /// The modules of a product. Names may have a place for the number of an expert.
    pub(super) fn product_modules(
        &self,
        named: &[(&str, usize)],
        expert: Option<usize>,
        product: Modules,
    ) -> Modules {
        let expert = expert.map_or_else(String::new, |expert| expert.to_string());
        let name = |name| self.name(name).replacen("{}", &expert, 1);
        let named = named.iter().map(|&(module, outputs)| (name(module), outputs));
        Modules { named: named.collect(), ..product }
    }

    /// A product with this number of inputs. If it is `onto` the residual stream, its weights begin
    /// smaller: each block adds two such products.
    pub(super) fn product_of(&self, inputs: usize, has_bias: bool, onto: bool) -> Modules {
        let Shape { initializer_range, layers, .. } = self.shape;
        let divisor = if onto { (2.0 * layers as f32).sqrt() } else { 1.0 };
        let init = Init::Normal(initializer_range / divisor);
        Modules { named: Vec::new(), inputs, has_bias, init, stacked: false }
    }

    /// The modules of attention's products: queries, keys and values; its output.
    fn attention_modules(&self) -> [Modules; 2] {
        if let Some(heads) = self.linear() {
            return self.linear_attention_modules(heads);
        }
        let Shape { names, hidden, heads, kv_heads, head_size: d, values, biases, .. } = self.shape;
        let of_queries = heads * d + self.widths().gates;
        let outputs = [of_queries, kv_heads * d, kv_heads * d];
        let own = if self.reads_kv() { 1 } else { 3 - usize::from(values == HeadValues::Keys) };
        let qkv: Vec<(&str, usize)> = match names.qkv {
            [fused] => vec![(*fused, self.shape.qkv())],
            three => three.iter().copied().zip(outputs).take(own).collect(),
        };
        let output = [(names.projection, hidden)];
        [
            self.product_modules(&qkv, None, self.product_of(hidden, biases[0], false)),
            self.product_modules(&output, None, self.product_of(heads * d, biases[1], true)),
        ]
    }

    /// The modules of the products of a feed-forward of so many channels.
    fn mlp_modules(&self, names: MlpNames<'_>, expert: Option<usize>) -> [Modules; 2] {
        let MlpNames { up, down, channels } = names;
        let Shape { hidden, biases, .. } = self.shape;
        let outputs = self.shape.up_of(channels) / up.len();
        let up: Vec<(&str, usize)> = up.iter().map(|name| (*name, outputs)).collect();
        let down = [(down, hidden)];
        [
            self.product_modules(&up, expert, self.product_of(hidden, biases[2], false)),
            self.product_modules(&down, expert, self.product_of(channels, biases[2], true)),
        ]
    }

    /// The modules of the feed-forward that all rows use: the dense one, or the shared expert.
    pub(super) fn common_modules(&self) -> Option<[Modules; 2]> {
        let Shape { names, intermediate, .. } = self.shape;
        let names = match self.experts() {
            None => MlpNames { up: names.up, down: names.down, channels: intermediate },
            Some(Experts { shared: 0, .. }) => return None,
            Some(Experts { shared, .. }) => {
                let [.., down] = names.shared;
                MlpNames { up: &names.shared[..2], down, channels: shared }
            }
        };
        Some(self.mlp_modules(names, None))
    }

    pub(super) fn expert_modules(&self, experts: Experts, expert: usize) -> [Modules; 2] {
        let Names { expert: names, stacked, .. } = self.shape.names;
        if let [up, down] = stacked {
            let names = MlpNames { up: slice::from_ref(up), down, channels: experts.intermediate };
            let modules = self.mlp_modules(names, None);
            return modules.map(|modules| Modules { stacked: true, ..modules });
        }
        let [.., down] = *names;
        let names = MlpNames { up: &names[..2], down, channels: experts.intermediate };
        self.mlp_modules(names, Some(expert))
    }

    /// The modules of the first block: attention's, and those of the feed-forward that all rows
    /// use.
    fn base_modules(&self) -> impl Iterator<Item = Modules> {
        let of_feed_forward = self.common_modules().into_iter().flatten();
        let of_input = self.input_modules().into_iter().flatten();
        self.attention_modules().into_iter().chain(of_feed_forward).chain(of_input)
    }

    /// The modules of the block's products that may have adapters.
    pub(super) fn modules(&self) -> impl Iterator<Item = Modules> {
        let of_experts = self.experts_apart().into_iter().flat_map(move |experts| {
            (0..experts.count).flat_map(move |expert| self.expert_modules(experts, expert))
        });
        self.base_modules().chain(of_experts)
    }

    /// Name, inputs and outputs of each module of the block's products.
    pub(crate) fn linear_modules(&self) -> Vec<(String, usize, usize)> {
        let of = |Modules { named, inputs, .. }: Modules| {
            named.into_iter().map(move |(name, outputs)| (name, inputs, outputs))
        };
        self.modules().flat_map(of).collect()
    }

    pub(super) fn norm_tensors(&self, name: &str, len: usize, has_shift: bool) -> Vec<Tensor> {
        self.shape.norm_tensors(&self.name(name), len, has_shift)
    }

    pub(super) fn product_tensors(&self, modules: &Modules) -> Vec<Tensor> {
        let Modules { ref named, inputs, has_bias, init, stacked } = *modules;
        let is_transposed = self.shape.transposed && !stacked;
        let tensor = |index: usize, end: &str, shape, kind, init| {
            let module = &named[index].0;
            let name = match (stacked, end) {
                (false, _) => format!("{module}.{end}"),
                (true, "weight") => module.clone(),
                (true, _) => format!("{module}_{end}"),
            };
            Tensor { joined: index > 0, stacked, ..Tensor::new(name, shape, kind, init) }
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

    /// The tensors of the adapters of these modules, in order.
    fn adapter_tensors(&self, modules: impl Iterator<Item = Modules>) -> Vec<Tensor> {
        let Some(adapters) = &self.adapters else { return Vec::new() };
        let tensors = |Modules { named, inputs, .. }: Modules| {
            let of = move |(name, n): (String, usize)| Some(adapters.of(&name)?.tensors(inputs, n));
            named.into_iter().filter_map(of).flatten()
        };
        modules.flat_map(tensors).collect()
    }

    /// The tensors of the first block: all but those of experts.
    pub(super) fn base_tensors(&self) -> Vec<Tensor> {
        let Shape { names, hidden: c, norms, .. } = self.shape;
        let shifts = self.shape.norms_shift();
        let [qkv, projection] = self.attention_modules();
        let experts = self.experts();
        let shared = experts.filter(|experts| experts.shared > 0);
        let mut all = Vec::new();
        if self.shape.has_attention_norm(self.number) {
            all.extend(self.norm_tensors(names.norm1, c, shifts));
        }
        all.extend(self.product_tensors(&qkv));
        all.extend(self.product_tensors(&projection));
        if norms != NormPlaces::BeforeBoth {
            all.extend(self.norm_tensors(names.norm2, c, shifts));
        }
        all.extend(experts.map(|experts| self.routing_tensor(names.router, experts.count)));
        let of_router = experts.filter(|experts| experts.router_bias);
        let normal = Init::Normal(self.shape.initializer_range);
        all.extend(of_router.map(|experts| {
            let name = format!("{}.bias", self.name(names.router));
            Tensor::new(name, vec![experts.count], Kind::Bias, normal)
        }));
        let common = self.common_modules().into_iter().flatten();
        all.extend(common.flat_map(|modules| self.product_tensors(&modules)));
        all.extend(shared.map(|_| self.routing_tensor(names.shared_gate, 1)));
        let of_branches = names.branch_norms.iter().filter(|_| norms == NormPlaces::Around);
        all.extend(of_branches.flat_map(|name| self.norm_tensors(name, c, shifts)));
        let of_heads = names.qk_norm.map(|name| self.name(name));
        let qk_norm = self.qk_norm().into_iter();
        let of_norms = qk_norm
            .flat_map(|norm| self.projected_shape().head_norm_tensors(norm, of_heads.clone()));
        all.extend(of_norms.take(if self.reads_kv() { 1 } else { 2 }));
        let sinks =
            || Tensor::new(self.name(names.sinks), vec![self.shape.heads], Kind::Bias, normal);
        all.extend(self.shape.sinks.then(sinks));
        let scalar =
            || Tensor::new(self.name(names.output_scalar), vec![1], Kind::Buffer, Init::Ones);
        all.extend(self.shape.output_scalars.then(scalar));
        all.extend(self.linear_tensors());
        all.extend(self.input_tensors());
        all.extend(self.adapter_tensors(self.base_modules()));
        all
    }

    /// The tensors of one expert: its products, then its adapters.
    pub(super) fn expert_tensors(&self, experts: Experts, expert: usize) -> Vec<Tensor> {
        let modules = self.expert_modules(experts, expert);
        let mut all: Vec<Tensor> =
            modules.iter().flat_map(|modules| self.product_tensors(modules)).collect();
        all.extend(self.adapter_tensors(modules.into_iter()));
        let is_kept = experts.idle == IdleExperts::Keep;
        all.iter_mut().for_each(|tensor| tensor.kept_with = is_kept.then_some(expert));
        all
    }

    pub(super) fn tensors_of_blocks(&self) -> Vec<Vec<Tensor>> {
        let bundles = self.experts().into_iter().flat_map(|experts| {
            (0..self.count_bundles()).map(move |nth| {
                self.bundle(nth).flat_map(|expert| self.expert_tensors(experts, expert)).collect()
            })
        });
        [self.base_tensors()].into_iter().chain(bundles).collect()
    }

    pub(super) fn count_blocks(&self) -> usize {
        1 + self.count_bundles()
    }

    /// Sorts the tensors of these experts, or their gradients, by name.
    pub(super) fn sorted_experts<E: Copy>(
        &self,
        views: &[E],
        experts: Range<usize>,
    ) -> Vec<Mlp<E>> {
        let mut next = Next { block: self, views: views.iter().copied(), site: 0 };
        let has_bias = self.shape.biases[2];
        let of = self.experts();
        let expert = |number| {
            let affines = [(); 2].map(|()| next.affine(has_bias));
            next.mlp(affines, self.expert_modules(of.expect("the block has experts"), number))
        };
        experts.map(expert).collect()
    }

    /// Sorts the tensors of a step with the base block, or their gradients, by name. `experts` are
    /// those of experts.
    pub(super) fn sorted<V: Copy, E: Copy>(&self, views: &[V], experts: &[E]) -> Tensors<V, E> {
        let Shape { norms, sinks, output_scalars, .. } = self.shape;
        let biases = self.biases();
        let shifts = self.shape.norms_shift();
        let mut next = Next { block: self, views: views.iter().copied(), site: 0 };
        let norm1 = self.shape.has_attention_norm(self.number).then(|| next.affine(shifts));
        let qkv = next.affine(biases[0]);
        let projection = next.affine(biases[1]);
        let norm2 = norm1.filter(|_| norms == NormPlaces::BeforeBoth);
        let norm2 = norm2.unwrap_or_else(|| next.affine(shifts));
        let norm1 = norm1.unwrap_or(norm2); // Nothing reads it where it is missing.
        let router = self.experts().map(|experts| next.affine(experts.router_bias));
        let common = self.common_modules();
        let mlp = common.as_ref().map(|_| [(); 2].map(|()| next.affine(biases[2])));
        let gate = mlp.as_ref().and(router).map(|_| next.view());
        let branch_norms = match norms {
            NormPlaces::Around => Some([(); 2].map(|()| next.affine(shifts))),
            NormPlaces::Behind => Some([norm1, norm2]),
            NormPlaces::Before
            | NormPlaces::BeforeButFirst
            | NormPlaces::BehindSums
            | NormPlaces::BeforeBoth
            | NormPlaces::BeforeEach => None,
        };
        let qk_norm = self.qk_norm().map(|_| {
            let query = next.view();
            [query, if self.reads_kv() { query } else { next.view() }]
        });
        let sinks = sinks.then(|| next.view());
        let output_scalar = output_scalars.then(|| next.view());
        let linear = self.linear().map(|_| LinearTensors::next(|| next.view()));
        let input_modules = self.input_modules();
        let input = input_modules
            .as_ref()
            .map(|_| [(); 3].map(|()| Affine { weight: next.view(), bias: None }));
        let [of_qkv, of_projection] = self.attention_modules();
        let qkv = next.product(qkv, of_qkv);
        let projection = next.product(projection, of_projection);
        let mlp = mlp.zip(common).map(|(affines, modules)| next.mlp(affines, modules));
        let input = input.zip(input_modules).map(|([gate, output, norm], [of_gate, of_output])| {
            let gate = next.product(gate, of_gate);
            InputTensors { gate, output: next.product(output, of_output), norm }
        });
        let feed_forward = match router {
            Some(router) => FeedForward::Experts(ExpertWeights {
                router,
                shared: mlp.zip(gate).map(|(mlp, gate)| SharedExpert { mlp, gate }),
                experts: self.sorted_experts(experts, self.experts_of(0)),
            }),
            None => FeedForward::Dense(mlp.expect("a block without experts has a feed-forward")),
        };
        Tensors {
            norm1,
            qkv,
            qk_norm,
            projection,
            norm2,
            feed_forward,
            branch_norms,
            sinks,
            output_scalar,
            linear,
            input,
        }
    }
}
