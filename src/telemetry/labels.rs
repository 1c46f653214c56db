//! The values that the labels of each metric can have.

use l2l_actors::work::Lane;

use super::status::FAULTS;
use super::{State, WaitCause};
use crate::plan::{DEVICE_TERMS, HOST_TERMS};

/// The values of a label.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LabelValues {
    /// The label has one of these values.
    Listed(Vec<&'static str>),
    /// The label has other values, which this text describes.
    Described(&'static str),
}

/// The metrics of validations, by the heads that have them.
const METRICS: [&str; 22] = [
    "loss",
    "perplexity",
    "accuracy",
    "f1",
    "matthews",
    "pearson",
    "spearman",
    "subset_accuracy",
    "precision_micro",
    "precision_macro",
    "recall_micro",
    "recall_macro",
    "f1_micro",
    "f1_macro",
    "reward_accuracy",
    "reward_margin",
    "reward_chosen",
    "reward_rejected",
    "logp_chosen",
    "logp_rejected",
    "margin",
    "mean",
];

/// The values that a metric's label can have.
///
/// # Panics
/// If no metric of the list has this label.
pub fn label_values(metric: &str, label: &str) -> LabelValues {
    use LabelValues::{Described, Listed};
    let lanes = |is_there: fn(Lane) -> bool| {
        Listed(Lane::ALL.into_iter().filter(|&lane| is_there(lane)).map(Lane::name).collect())
    };
    let waits = WaitCause::ALL.map(WaitCause::name);
    match (label, metric) {
        ("run", _) => Described("the run's name: `metrics.run`, or a made-up one"),
        ("layer", _) => Described(
            "the layer's number in the order of the forward pass, padded with zeros so that \
             numbers sort; 0 is the embedding",
        ),
        ("phase", _) => Listed(vec!["forward", "backward"]),
        ("lane", "l2l_visit_seconds_total") => {
            Listed([Lane::Upload, Lane::Compute, Lane::Download, Lane::Host].map(Lane::name).into())
        }
        ("lane", "l2l_device_lane_seconds_total") => lanes(Lane::is_of_device),
        ("lane", _) => lanes(|_| true),
        ("cause", _) => Listed(vec!["transfer", "host"]),
        ("waited_for", "l2l_compute_wait_seconds_total") => {
            Listed(waits.into_iter().chain(["checkpoint", "outside"]).collect())
        }
        ("waited_for", _) => Listed(waits.into()),
        ("device", _) => {
            Described("`cpu` with the device's number, or `cuda` with the GPU's ordinal: `cuda0`")
        }
        ("rank", _) => Described("the rank's number, from 0"),
        ("direction", "l2l_fabric_bytes_total") => Listed(vec!["sent", "received"]),
        ("direction", _) => Listed(vec!["upload", "download", "peer"]),
        ("actor", _) => Listed(vec![
            "fetcher",
            "prefetcher",
            "peer_copier",
            "executor",
            "stasher",
            "reducer",
            "optimizer",
        ]),
        ("state", "l2l_state") => Listed(State::ALL.map(State::name).into()),
        ("state", _) => Listed(vec!["busy", "starved", "blocked"]),
        ("channel", _) => Listed(vec![
            "weights",
            "visits",
            "stash",
            "outputs",
            "gradients",
            "reduced",
            "parts",
            "reads",
            "states",
        ]),
        ("kind", "l2l_device_memory_bytes") => Listed(DEVICE_TERMS.into()),
        ("kind", "l2l_host_memory_bytes") => Listed(HOST_TERMS.into()),
        ("kind", _) => Listed(FAULTS.into()),
        ("set", _) => {
            Described("the name of the validation set; `validation` where it has no other")
        }
        ("metric", _) => Listed(METRICS.into()),
        ("version", _) => Described("the program's version"),
        ("link", _) => Described("`device.link` of the config, or `none`"),
        _ => panic!("no metric has the label {label}"),
    }
}
