//! Low-rank adapters (LoRA, Hu et al. 2021): the product y = x W of a module becomes
//! y = x W + s · dropout(x) Aᵀ Bᵀ, in which A and B have few rows and columns. W is frozen.

use super::layer::{Init, Kind, Tensor};

/// The adapters of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapters {
    /// Probability of dropout of the input of A.
    pub dropout: f32,
    /// The modules that have an adapter.
    pub modules: Vec<AdaptedModule>,
}

/// A module with an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptedModule {
    /// The module's name, without `.weight`.
    pub name: String,
    /// r: the rows of A, and the columns of B.
    pub rank: usize,
    /// s: the factor of the adapter's output.
    pub scale: f32,
}

/// The ends of the names of an adapter's two tensors, as in PEFT.
pub(crate) const ENDS: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];

/// The key of adapters' files that names what was trained beside them.
pub(crate) const SAVED: &str = "modules_to_save";

/// Whether a tensor belongs to an adapter.
pub(crate) fn is_of_adapter(name: &str) -> bool {
    ENDS.iter().any(|end| name.ends_with(end))
}

impl Adapters {
    /// The adapter of a module, if it has one.
    pub fn of(&self, module: &str) -> Option<&AdaptedModule> {
        self.modules.iter().find(|one| one.name == module)
    }

    /// The highest rank.
    pub(crate) fn most_rank(&self) -> usize {
        self.modules.iter().map(|one| one.rank).max().unwrap_or(0)
    }
}

impl AdaptedModule {
    /// A (r, inputs) and B (outputs, r) of a module. As in PEFT, A begins uniform in ±1 ÷ √inputs
    /// and B with zeros, so an adapter adds nothing at first.
    pub(crate) fn tensors(&self, inputs: usize, outputs: usize) -> [Tensor; 2] {
        let tensor = |end: &str, shape: Vec<usize>, init| {
            Tensor::new(format!("{}{end}", self.name), shape, Kind::Weight, init)
        };
        let bound = 1.0 / (inputs as f32).sqrt();
        let [a, b] = ENDS;
        [
            tensor(a, vec![self.rank, inputs], Init::Uniform(bound)),
            tensor(b, vec![outputs, self.rank], Init::Zeros),
        ]
    }
}
