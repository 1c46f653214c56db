//! Rates that follow from the speeds of a device and its host, and from the shapes of layers.

use std::collections::HashMap;
use std::iter;

use l2l_actors::schedule::Phase;

use super::fixed::Fixed;
use super::forecast::{PHASES, Rates};
use crate::config::{Config, DeviceKind};
use crate::models::{Model, ModelLayer};
use crate::plan::{Purpose, most_positions};

/// The speeds that rates are derived from, a second.
pub(super) struct Speeds {
    /// FLOP of products.
    pub(super) flops: f64,
    /// Bytes that the device's memory moves.
    pub(super) stream: f64,
    /// Times that a layer of the stack reads or writes a hidden state in f32, or as many bytes, in
    /// a forward pass beside its products. A backward pass has as many more as it has FLOPs.
    pub(super) passes: f64,
    /// Seconds that a kernel takes whatever its size.
    pub(super) launch: f64,
    /// Bytes that a link moves, each way.
    pub(super) link: f64,
    /// Bytes that the host's memory moves.
    pub(super) host: f64,
}

/// Times that a head reads or writes its logits in f32, and the state that they are made of, or as
/// many bytes: a product writes the logits, and the sum of their exponentials reads them.
const HEAD_PASSES: f64 = 2.0;

/// In a backward pass both again. Then the gradients of the logits, in 16 bits, are written once
/// and read by two products.
const HEAD_PASSES_BACKWARD: f64 = 4.0;

/// Kernels of a forward pass through a layer of the stack. BERT's has 6 products, attention, 2
/// norms, 2 sums and the activation function. A backward pass has as many more as it has FLOPs.
const KERNELS: f64 = 12.0;

impl Speeds {
    /// Seconds that each layer and phase takes whatever the number of sequences.
    fn fixed(&self, config: &Config, model: &Model) -> Fixed {
        let mut fixed = Fixed::default();
        if self.launch == 0.0 {
            return fixed;
        }
        let save = config.schedule.recompute.keep();
        for layer in (1..model.layers.len()).filter(|&layer| model.layers[layer].stack().is_some())
        {
            let flops_of = |phase| model.visit_flops(layer, phase, iter::once(0..1), save);
            for phase in PHASES {
                let share = flops_of(phase) / flops_of(Phase::Forward).max(1.0);
                fixed.compute.insert((layer as u32, phase), self.launch * KERNELS * share);
            }
        }
        fixed
    }

    /// Seconds of a sequence's positions in each layer and phase.
    fn compute(&self, config: &Config, model: &Model) -> HashMap<(u32, Phase), f64> {
        let positions = config.sequence_length(&model.shape).unwrap_or(1);
        let save = config.schedule.recompute.keep();
        let is_emulated = config.flops_per_second().ok().flatten().is_some();
        // An emulated device sleeps for the FLOPs of all positions.
        let is_masked = model.shape.masked_head() && !is_emulated;
        let scored = if is_masked { config.data.mask_probability } else { 1.0 };
        let mut compute = HashMap::new();
        let bytes = |width: usize| (positions * width * size_of::<f32>()) as f64;
        for (layer, of) in model.layers.iter().enumerate().skip(1) {
            let flops_of = |phase| model.visit_flops(layer, phase, iter::once(0..positions), save);
            for phase in PHASES {
                let products = flops_of(phase);
                let (share, moved) = match of {
                    ModelLayer::Head(tile) => {
                        let backward = phase == Phase::Backward;
                        let passes = if backward { HEAD_PASSES_BACKWARD } else { HEAD_PASSES };
                        (scored, passes * bytes(tile.rows + model.shape.hidden))
                    }
                    // Each product reads and writes memory at least once, in proportion to its
                    // FLOPs.
                    _ => {
                        let share = products / flops_of(Phase::Forward).max(1.0);
                        (1.0, self.passes * share * bytes(model.shape.hidden))
                    }
                };
                let seconds = share * (products / self.flops + moved / self.stream);
                compute.insert((layer as u32, phase), seconds);
            }
        }
        compute
    }
}

/// Bytes a second of a disk that was not measured.
const DISK: f64 = 1e9;

/// Bytes a second of a fabric that was not measured: 10 Gbit/s.
const FABRIC: f64 = 1.25e9;

impl Rates {
    /// Derives all rates from three: `flops` of the device a second, and the bytes a second that
    /// the `link` and the `host`'s memory move.
    pub fn of(config: &Config, model: &Model, flops: f64, link: f64, host: f64) -> Rates {
        let emulated = config.flops_per_second().ok().flatten();
        let (flops, stream) = match (emulated, config.device.kind) {
            (Some(emulated), _) => (emulated, f64::INFINITY),
            // Devices on one processor share its cores.
            (None, DeviceKind::Cpu) => (flops / f64::from(config.devices()), host),
            (None, DeviceKind::Cuda) => (flops, host),
        };
        // At least the input is read, and the output written.
        let speeds = Speeds { flops, stream, passes: 2.0, launch: 0.0, link, host };
        Rates::of_speeds(config, model, &speeds)
    }

    /// Derives all rates from the speeds of a device and its host.
    pub(super) fn of_speeds(config: &Config, model: &Model, speeds: &Speeds) -> Rates {
        let &Speeds { link, host, .. } = speeds;
        let positions = config.sequence_length(&model.shape).unwrap_or(1);
        // The mean chunk of a long sequence, or the whole sequence.
        let most = most_positions(config, model, Purpose::Train).unwrap_or(positions);
        let chunks = positions.div_ceil(most).max(1);
        let mut compute = speeds.compute(config, model);
        compute.values_mut().for_each(|seconds| *seconds /= chunks as f64);
        let state = (positions * model.shape.hidden * size_of::<f32>()) as f64 / chunks as f64;
        Rates {
            compute,
            chunks,
            kept: Default::default(),
            link: [link; 2],
            peers: link,
            boundaries: [link; 2],
            on_device: [host; 2],
            host: 2.0 * state / host,
            reduce: host / 3.0,
            update: host / 7.0,
            file: [DISK; 2],
            fabric: config.fabric_bytes_per_second().ok().flatten().unwrap_or(FABRIC),
            fixed: speeds.fixed(config, model),
            sharing: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::shape_of;

    /// A head costs its products and its logits, whatever passes a layer of the stack makes. One of
    /// masked tokens scores the labelled positions alone.
    #[test]
    fn a_head_reads_and_writes_its_logits() {
        for preset in ["gpt2", "bert-base"] {
            let mut config = Config::default();
            config.model.preset = Some(preset.into());
            config.data.sequence_length = Some(64);
            let model = Model::new(shape_of(&config).expect("a preset"));
            let head = model.layers.iter().position(ModelLayer::is_head).expect("it has a head");
            let ModelLayer::Head(tile) = &model.layers[head] else { panic!("it scores tokens") };
            let logits = (64 * (tile.rows + model.shape.hidden) * size_of::<f32>()) as f64;
            let scored = if preset == "gpt2" { 1.0 } else { 0.15 };
            for (phase, products, passes) in
                [(Phase::Forward, 1.0, HEAD_PASSES), (Phase::Backward, 3.0, HEAD_PASSES_BACKWARD)]
            {
                let products = products * 2.0 * (64 * tile.rows * model.shape.hidden) as f64;
                for of_stack in [1.0, 50.0] {
                    let speeds = Speeds {
                        flops: 1e12,
                        stream: 1e10,
                        passes: of_stack,
                        launch: 1e-3,
                        link: 1e9,
                        host: 1e9,
                    };
                    let rates = Rates::of_speeds(&config, &model, &speeds);
                    let found = rates.compute_of(head as u32, phase).expect("of a head");
                    let expected = scored * (products / 1e12 + passes * logits / 1e10);
                    assert!((found / expected - 1.0).abs() < 1e-9, "{preset}: {found} {expected}");
                    assert_eq!(rates.fixed.of_compute(head as u32, phase), 0.0);
                }
            }
        }
    }
}
