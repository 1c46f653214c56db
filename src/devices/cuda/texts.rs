//! The kernels' texts in CUDA C++, and the parameters that they declare.

use std::collections::BTreeSet;

use l2l_actors::BoxedError;

use super::driver::Kind;
use crate::kernels::CustomKernel;
use crate::tensor::Dtype;

/// The text that is put in front of every other text.
pub(super) const PRELUDE: &str = include_str!("kernels/prelude.cu");

const ATTENTION: &str = concat!(
    include_str!("kernels/attention/heads.cu"),
    include_str!("kernels/attention/plain.cu"),
    include_str!("kernels/attention/plain_kernels.cu"),
    include_str!("kernels/attention/warp.cu"),
    include_str!("kernels/attention/mma.cu"),
    include_str!("kernels/attention/quad_pairs.cu"),
    include_str!("kernels/attention/tiles.cu"),
    include_str!("kernels/attention/passes.cu"),
    include_str!("kernels/attention/cores.cu"),
);

const LINEAR_ATTENTION: &str = concat!(
    include_str!("kernels/linear_attention/rows.cu"),
    include_str!("kernels/linear_attention/rule.cu"),
    include_str!("kernels/linear_attention/pieces.cu"),
);

/// Name and text of each file of kernels, or of files that are compiled as one.
pub(super) const TEXTS: [(&str, &str); 17] = [
    ("attention", ATTENTION),
    ("classes", include_str!("kernels/classes.cu")),
    ("cross_entropy", include_str!("kernels/cross_entropy.cu")),
    ("elementwise", include_str!("kernels/elementwise.cu")),
    ("embedding", include_str!("kernels/embedding.cu")),
    ("experts", include_str!("kernels/experts.cu")),
    ("gates", include_str!("kernels/gates.cu")),
    ("head_norm", include_str!("kernels/head_norm.cu")),
    ("linear_attention", LINEAR_ATTENTION),
    ("norm", include_str!("kernels/norm.cu")),
    ("packed", include_str!("kernels/packed.cu")),
    ("past", include_str!("kernels/past.cu")),
    ("product", include_str!("kernels/product.cu")),
    ("quantised", include_str!("kernels/quantised.cu")),
    ("rotary", include_str!("kernels/rotary.cu")),
    ("rows", include_str!("kernels/rows.cu")),
    ("sinks", include_str!("kernels/sinks.cu")),
];

/// The parts of a text that are compiled side by side. Each is the number of a kernel: the value of
/// `ONLY` in the text. `None`: the text is compiled as one. The kernels that take longest come
/// first.
pub(super) fn parts(text: &str, target: Target) -> Vec<Option<u32>> {
    const DELTA: u32 = 0;
    const PASSES: [u32; 3] = [2000, 1000, 3000];
    const HEAD_SIZES: [u32; 5] = [128, 256, 512, 64, 32];
    if text != ATTENTION {
        return vec![None];
    }
    let sizes = if target.has_tensor_cores() { &HEAD_SIZES[..] } else { &[0, 512] };
    let all = PASSES.iter().flat_map(|pass| sizes.iter().map(move |size| pass + size));
    all.chain([DELTA]).map(Some).collect()
}

/// A kernel, as its text declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Declared {
    pub(super) name: String,
    pub(super) parameters: Vec<Kind>,
}

/// The dtype and the architecture that texts are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// The dtype of weights and activations.
    pub(super) dtype: Dtype,
    /// 90 of 9.0.
    pub(super) architecture: u32,
}

/// The oldest architecture that kernels are written for.
const OLDEST: u32 = 70;

/// From this architecture on, tensor cores multiply bf16 too, and a block may have more than 64 KiB
/// of shared memory.
pub(super) const AMPERE: u32 = 80;

impl Target {
    /// A dtype on a GPU of an architecture.
    ///
    /// # Errors
    /// The GPU is too old.
    pub(super) fn new(dtype: Dtype, architecture: u32, gpu: &str) -> Result<Target, BoxedError> {
        let needs = match dtype {
            _ if architecture < OLDEST => format!("kernels are for {OLDEST} and newer"),
            Dtype::Bf16 if architecture < AMPERE => {
                format!("bf16 needs {AMPERE} or newer: set device.dtype = \"f16\" or \"f32\"")
            }
            _ => return Ok(Target { dtype, architecture }),
        };
        Err(format!("{gpu} is of architecture {architecture}, and {needs}").into())
    }

    /// Whether attention runs on tensor cores.
    pub(super) fn has_tensor_cores(self) -> bool {
        self.dtype != Dtype::F32
    }
}

/// The begins of four parts of attention's text: for floats alone, for wide heads, with tensor
/// cores, and the kernels for sm_70 and sm_75 that end it.
const PARTS: [&str; 4] = [
    "// The plain way for floats",
    "// The plain way for all elements",
    "// What products of a warp share on all architectures",
    "#if ELEMENT == 15 && (defined EMULATOR || __CUDA_ARCH__ < 800)",
];

/// The kernels of a text for a target, in its order.
///
/// # Errors
/// It is not written as the built-in texts are.
pub(super) fn declared(text: &str, target: Target) -> Result<Vec<Declared>, BoxedError> {
    let [floats, wide, cores, in_64k] = PARTS.map(|part| text.find(part).unwrap_or(text.len()));
    let end = if target.architecture < AMPERE { text.len() } else { in_64k };
    let parts = match target.has_tensor_cores() {
        false => [&text[..cores], ""],
        true => [&text[..floats], &text[wide..end]],
    };
    let lines = parts.into_iter().flat_map(str::lines);
    let bare: Vec<&str> =
        lines.map(|line| line.split_once("//").map_or(line, |(code, _)| code)).collect();
    let bare = bare.join(" ");
    bare.split("__global__ void").skip(1).map(|text| kernel(text, target.dtype)).collect()
}

/// The definition of the texts' `ELEMENT`.
pub(super) fn element(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "-DELEMENT=32",
        Dtype::Bf16 => "-DELEMENT=16",
        Dtype::F16 => "-DELEMENT=15",
    }
}

/// Parses the declaration of one kernel. `text` begins behind its return type.
fn kernel(text: &str, dtype: Dtype) -> Result<Declared, BoxedError> {
    let cut = || -> BoxedError { "a kernel's declaration does not end".into() };
    let text = text.trim_start();
    let text = match text.strip_prefix("__launch_bounds__") {
        Some(text) => text.split_once(')').ok_or_else(cut)?.1.trim_start(),
        None => text,
    };
    let (name, rest) = text.split_once('(').ok_or_else(cut)?;
    let (parameters, _) = rest.split_once(')').ok_or_else(cut)?;
    let parameters = parameters.split(',').map(|one| kind(one, dtype)).collect::<Result<_, _>>();
    let parameters = parameters.map_err(|error| format!("{}: {error}", name.trim()))?;
    Ok(Declared { name: name.trim().into(), parameters })
}

/// A text's name, the text, and its kernels.
type Text = (&'static str, &'static str, Vec<Declared>);

/// The built-in kernels and the custom ones, each with the text it is in.
///
/// # Errors
/// A custom kernel is not in its text, or has the name of another.
pub(super) fn all(custom: &[CustomKernel], target: Target) -> Result<Vec<Text>, BoxedError> {
    let mut all: Vec<Text> = Vec::new();
    let mut known: BTreeSet<String> = BTreeSet::new();
    for (name, text) in TEXTS {
        let kernels = declared(text, target)?;
        known.extend(kernels.iter().map(|kernel| kernel.name.clone()));
        all.push((name, text, kernels));
    }
    for CustomKernel { name, text, .. } in custom {
        let mut kernels = declared(text, target)?;
        kernels.retain(|kernel| kernel.name == *name);
        if kernels.is_empty() {
            return Err(format!("the text of {name} declares no kernel of that name").into());
        }
        let there = all.iter_mut().find(|(_, other, _)| other == text);
        let is_again = there.as_ref().is_some_and(|(.., known)| known.contains(&kernels[0]));
        if !known.insert((*name).into()) && !is_again {
            return Err(format!("two kernels are called {name}").into());
        }
        match there {
            Some((.., known)) if !is_again => known.extend(kernels),
            Some(_) => {}
            None => all.push((name, text, kernels)),
        }
    }
    Ok(all)
}

/// The type of a parameter.
fn kind(parameter: &str, dtype: Dtype) -> Result<Kind, BoxedError> {
    let parameter = parameter.trim();
    if let Some((to, _)) = parameter.split_once('*') {
        let to = to.trim();
        return Ok(match to.strip_prefix("const ").unwrap_or(to).trim() {
            "T" if dtype != Dtype::F32 => Kind::Elements,
            "T" | "float" => Kind::Floats,
            _ => Kind::Pointer,
        });
    }
    Ok(match parameter.rsplit_once(' ').map(|(kind, _)| kind.trim()) {
        Some("int") => Kind::Int,
        Some("long long") => Kind::Long,
        Some("float") => Kind::Float,
        Some("Dropout") => Kind::Of("Dropout"),
        Some("Attention") => Kind::Of("Attention"),
        Some("ColumnGroups") => Kind::Of("ColumnGroups"),
        Some("NormParts") => Kind::Of("NormParts"),
        Some("Rotary") => Kind::Of("Rotary"),
        Some("Linear") => Kind::Of("Linear"),
        _ => return Err(format!("it takes {parameter:?}").into()),
    })
}
