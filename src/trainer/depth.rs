//! Which layers a training step leaves out, as `[depth]` says.

use crate::config::DepthConfig;
use crate::models::LayerSelection;
use crate::random;

/// The layers of training step `step` (from 0). They follow from the seed, the step and the config,
/// so a run that resumes chooses the same. At least the first layer is used.
pub(super) fn selection(
    depth: &DepthConfig,
    seed: u64,
    step: u64,
    layers: usize,
) -> LayerSelection {
    if depth.drop == 0.0 {
        return LayerSelection::default();
    }
    let mut state = random::keyed(seed ^ DEPTH, step);
    let stays = |layer: &usize| {
        let chance = random::unit(&mut state);
        chance >= depth.probability(step, *layer, layers)
    };
    let mut left: Vec<usize> = (0..layers).filter(stays).collect();
    if left.is_empty() && layers > 0 {
        left.push(0);
    }
    LayerSelection::of(left)
}

/// Makes these random numbers differ from those of the data and of dropout, which have the same
/// seed.
const DEPTH: u64 = 0x6465_7074_6820_6472;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DropRule;

    #[test]
    fn layers_stay_as_often_as_the_config_says() {
        let depth = DepthConfig { drop: 0.3, rule: DropRule::Uniform, ..DepthConfig::default() };
        let steps = 4000;
        let layers = 6;
        let mut stayed = [0; 6];
        for step in 0..steps {
            let chosen = selection(&depth, 1, step, layers);
            assert_eq!(chosen, selection(&depth, 1, step, layers));
            chosen.layers.into_iter().flatten().for_each(|layer| stayed[layer] += 1);
        }
        for count in stayed {
            let share = f64::from(count) / steps as f64;
            assert!((share - 0.7).abs() < 0.03, "{stayed:?}");
        }
        let none = DepthConfig { drop: 0.0, ..depth };
        assert_eq!(selection(&none, 1, 5, layers), LayerSelection::default());
    }
}
