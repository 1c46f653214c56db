//! Low-rank adapters (LoRA, Hu et al. 2021): the product y = x W of a module becomes
//! y = x W + s · dropout(x) Aᵀ Bᵀ, in which A and B have few rows and columns. W is frozen.

use super::layer::{Init, Kind, Tensor};

/// The adapters of a transformer block.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapters {
    /// r: the rows of A, and the columns of B.
    pub rank: usize,
    /// s: the factor of what adapters add.
    pub scale: f32,
    /// Probability of dropout of what A reads.
    pub dropout: f32,
    /// The modules that have one, by name: of the block's products, those before their `.weight`.
    pub modules: Vec<String>,
}

/// The ends of the names of an adapter's two tensors, as in PEFT.
pub(crate) const ENDS: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];

/// Whether a tensor is of an adapter.
pub(crate) fn is_of_adapter(name: &str) -> bool {
    ENDS.iter().any(|end| name.ends_with(end))
}

impl Adapters {
    /// Whether a module has an adapter.
    pub fn has(&self, module: &str) -> bool {
        self.modules.iter().any(|name| name == module)
    }

    /// A (r, inputs) and B (outputs, r) of a module. A begins uniform in ±1 ÷ √inputs, as PEFT's
    /// does, and B with zeros: so an adapter adds nothing at first.
    pub(crate) fn tensors(&self, module: &str, inputs: usize, outputs: usize) -> [Tensor; 2] {
        let tensor = |end: &str, shape: Vec<usize>, init| Tensor {
            name: format!("{module}{end}"),
            shape,
            kind: Kind::Weight,
            init,
            joined: false,
        };
        let bound = 1.0 / (inputs as f32).sqrt();
        let [a, b] = ENDS;
        [
            tensor(a, vec![self.rank, inputs], Init::Uniform(bound)),
            tensor(b, vec![outputs, self.rank], Init::Zeros),
        ]
    }
}
