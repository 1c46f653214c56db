//! The kernels' texts, and what they declare.

use super::driver::Kind;

/// What stands before each other text.
pub(super) const PRELUDE: &str = include_str!("kernels/prelude.cu");

/// Name and text of each file of kernels.
pub(super) const TEXTS: [(&str, &str); 10] = [
    ("attention", include_str!("kernels/attention.cu")),
    ("classes", include_str!("kernels/classes.cu")),
    ("cross_entropy", include_str!("kernels/cross_entropy.cu")),
    ("elementwise", include_str!("kernels/elementwise.cu")),
    ("embedding", include_str!("kernels/embedding.cu")),
    ("head_norm", include_str!("kernels/head_norm.cu")),
    ("norm", include_str!("kernels/norm.cu")),
    ("past", include_str!("kernels/past.cu")),
    ("rotary", include_str!("kernels/rotary.cu")),
    ("rows", include_str!("kernels/rows.cu")),
];

/// A kernel, as its text declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Declared {
    pub(super) name: String,
    pub(super) parameters: Vec<Kind>,
}

/// The kernels of a text, in its order, but for those that floats do not need.
pub(super) fn declared(text: &str) -> Vec<Declared> {
    let here = text.lines().take_while(|line| !line.starts_with("#ifdef HAS_TENSOR_CORES"));
    let bare: Vec<&str> =
        here.map(|line| line.split_once("//").map_or(line, |(code, _)| code)).collect();
    let bare = bare.join(" ");
    let kernels = bare.split("__global__ void").skip(1);
    kernels
        .map(|text| {
            let text = text.trim_start();
            let bound = text.strip_prefix("__launch_bounds__");
            let text = bound.map_or(text, |text| {
                let end = text.find(')').expect("a bound ends");
                text[end + 1..].trim_start()
            });
            let (name, rest) = text.split_once('(').expect("a kernel has parameters");
            let (parameters, _) = rest.split_once(')').expect("they end");
            let parameters = parameters.split(',').map(kind).collect();
            Declared { name: name.trim().into(), parameters }
        })
        .collect()
}

/// What a parameter is.
fn kind(parameter: &str) -> Kind {
    let parameter = parameter.trim();
    if parameter.contains('*') {
        return Kind::Pointer;
    }
    match parameter.rsplit_once(' ').map(|(kind, _)| kind.trim()) {
        Some("int") => Kind::Int,
        Some("long long") => Kind::Long,
        Some("float") => Kind::Float,
        Some("Dropout") => Kind::Of("Dropout"),
        Some("Attention") => Kind::Of("Attention"),
        Some("Frequencies") => Kind::Of("Frequencies"),
        _ => panic!("a kernel takes {parameter}"),
    }
}
