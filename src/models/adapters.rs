//! Low-rank adapters (LoRA, Hu et al. 2021): the product y = x W of a module becomes
//! y = x W + s · dropout(x) Aᵀ Bᵀ, in which A and B have few rows and columns. W is frozen.

use super::layer::{Init, Kind, Tensor};

/// The adapters of a transformer block.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapters {
    /// r: the rows of A, and the columns of B.
    pub rank: usize,
    /// s: the factor of an adapter's output.
    pub scale: f32,
    /// Probability of dropout of the input of A.
    pub dropout: f32,
    /// The names of the modules that have an adapter, without `.weight`.
    pub modules: Vec<String>,
}

/// The ends of the names of an adapter's two tensors, as in PEFT.
pub(crate) const ENDS: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];

/// Whether a tensor belongs to an adapter.
pub(crate) fn is_of_adapter(name: &str) -> bool {
    ENDS.iter().any(|end| name.ends_with(end))
}

impl Adapters {
    /// Whether a module has an adapter.
    pub fn has(&self, module: &str) -> bool {
        self.modules.iter().any(|name| name == module)
    }

    /// A (r, inputs) and B (outputs, r) of a module. As in PEFT, A begins uniform in ±1 ÷ √inputs and
    /// B with zeros, so an adapter adds nothing at first.
    pub(crate) fn tensors(&self, module: &str, inputs: usize, outputs: usize) -> [Tensor; 2] {
        let tensor = |end: &str, shape: Vec<usize>, init| {
            Tensor::new(format!("{module}{end}"), shape, Kind::Weight, init)
        };
        let bound = 1.0 / (inputs as f32).sqrt();
        let [a, b] = ENDS;
        [
            tensor(a, vec![self.rank, inputs], Init::Uniform(bound)),
            tensor(b, vec![outputs, self.rank], Init::Zeros),
        ]
    }
}
