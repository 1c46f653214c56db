//! Recognises weights that another program has quantised. They are not read, but for the MXFP4 of
//! gpt-oss.

use std::path::Path;

use super::config::read_config;
use crate::error::Error;

/// The ends of names of tensors that quantised weights consist of, and the programs that write
/// them.
const ENDS: [(&str, &str); 11] = [
    (".qweight", "GPTQ or AWQ"),
    (".qzeros", "GPTQ or AWQ"),
    (".g_idx", "GPTQ"),
    (".absmax", "bitsandbytes"),
    (".quant_map", "bitsandbytes"),
    (".quant_state.bitsandbytes__nf4", "bitsandbytes"),
    (".quant_state.bitsandbytes__fp4", "bitsandbytes"),
    (".SCB", "bitsandbytes"),
    (".weight_scale_inv", "FP8"),
    (".weight_scale", "FP8 or compressed-tensors"),
    (".weight_packed", "compressed-tensors"),
];

/// What to do about quantised weights.
const INSTEAD: &str = "l2l reads f32, f16 and bf16: take the model that they were made from. \
                       train.base = \"nf4\" or \"int8\" quantises it when it is read";

/// Refuses a directory whose `config.json` says that its weights are quantised.
pub(super) fn check_config(directory: &Path) -> Result<(), Error> {
    let Ok(config) = read_config(directory) else { return Ok(()) };
    let Some(how) = config["quantization_config"].as_object() else { return Ok(()) };
    let method = how.get("quant_method").and_then(|method| method.as_str());
    let method = method.unwrap_or("bitsandbytes");
    if method == "mxfp4" && config["model_type"] == "gpt_oss" {
        return Ok(());
    }
    let what = format_args!(
        "quantization_config says that the weights are quantised ({method}), and {INSTEAD}. If \
         they are not quantised any more, remove that key"
    );
    Err(Error::bad_model(directory.join("config.json").display(), what))
}

/// Refuses a tensor that the model does not have, if it is part of a quantised weight.
pub(super) fn check_name(name: &str) -> Result<(), String> {
    match ENDS.iter().find(|(end, _)| name.ends_with(end)) {
        Some((_, by)) => {
            Err(format!("{name} is of a weight that is quantised ({by}), and {INSTEAD}"))
        }
        None => Ok(()),
    }
}
