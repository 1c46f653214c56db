//! The events of a run as JSON: one object for each step, each validation and the end. Other
//! programs read the fields, so their names do not change.

use serde_json::{Value, json};

use crate::engine::{StepReport, Summary};
use crate::inference::Evaluation;
use crate::machine;

impl StepReport {
    /// The step as an event, with the memory that the process has in use now.
    pub fn event(&self) -> Value {
        let mut event = json!({
            "event": "step",
            "step": self.step,
            "loss": self.loss,
            "learning_rate": self.learning_rate,
            "grad_norm": self.grad_norm,
            "tokens": self.tokens,
            "model_flops": self.model_flops,
            "seconds": self.seconds,
            "exposed_wait_seconds": self.exposed_wait_seconds,
            "device_peak_bytes": self.device_peak_bytes,
            "host_rss_bytes": machine::resident_memory(),
        });
        self.metrics.iter().for_each(|(name, mean)| event[name] = json!(mean));
        add_router_losses(&mut event, [self.balance_loss, self.z_loss]);
        if let Some(scale) = self.loss_scale {
            event["loss_scale"] = json!(scale);
        }
        if self.skipped {
            event["skipped"] = json!(true);
        }
        if let Some((device, _)) = self.slowest_device {
            event["slowest_device"] = json!(device);
        }
        event
    }
}

impl Evaluation {
    /// The evaluation as the event of a validation after training step `step`.
    pub fn event(&self, step: u64) -> Value {
        let mut event = json!({ "event": "validation", "step": step });
        if let Some(set) = &self.set {
            event["set"] = json!(set);
        }
        self.values().iter().for_each(|(name, value)| event[*name] = json!(value));
        event
    }
}

/// Adds the losses of the routers to an event, if there are any.
fn add_router_losses(event: &mut Value, [balance, z]: [Option<f64>; 2]) {
    for (name, loss) in [("balance_loss", balance), ("z_loss", z)] {
        if let Some(loss) = loss {
            event[name] = json!(loss);
        }
    }
}

impl Summary {
    /// The summary as an event, with the [digest](crate::Trainer::digest) of the weights, if it is
    /// known. `link` is the emulated link, `device.link`.
    pub fn event(&self, weights_digest: Option<&str>, link: Option<&str>) -> Value {
        let mut event = json!({
            "event": "summary",
            "steps": self.steps,
            "seconds": self.seconds,
            "visits": self.visits,
            "bytes_uploaded": self.bytes_uploaded,
            "bytes_downloaded": self.bytes_downloaded,
            "pinned_bytes": self.pinned_bytes,
        });
        if let Some(digest) = weights_digest {
            event["weights_digest"] = json!(digest);
        }
        add_router_losses(&mut event, [self.balance_loss, self.z_loss]);
        if self.skipped > 0 {
            event["skipped_steps"] = json!(self.skipped);
        }
        if let Some(link) = link {
            event["link"] = json!(link);
        }
        event
    }
}
