//! Ten steps of each rule against goldens.

use super::*;
use crate::models::{Init, Kind};

/// Ten steps of each rule against `tests/goldens/optimizers.py`: PyTorch's rules, or the
/// paper's, in f64.
#[test]
fn every_rule_is_pytorchs_or_the_papers() {
    let text = include_str!("../../tests/goldens/optimizers.json");
    let golden: serde_json::Value = serde_json::from_str(text).expect("it is committed");
    let numbers = |value: &serde_json::Value| -> Vec<f64> {
        let list = value.as_array().expect("a list").iter();
        list.map(|number| number.as_f64().expect("a number")).collect()
    };
    let decay = |rate: f64| WeightDecay { rate, except: vec!["bias".into()] };
    let (betas, epsilon) = ((0.9, 0.99), 1e-8);
    let adamw = || AdamW { betas, epsilon, decay: decay(0.1) };
    let adafactor = Adafactor {
        decay_rate: -0.8,
        epsilon: f64::from(f32::EPSILON),
        clip_threshold: 1.0,
        scale_parameter: true,
        relative_step: false,
        decay: decay(0.1),
    };
    let muon = |nesterov, rate| Muon::new(0.95, nesterov, rate, decay(0.1), adamw());
    let rules: Vec<(&str, Box<dyn UpdateRule>)> = vec![
        ("adamw", Box::new(AdamW { betas, epsilon, decay: decay(0.1) })),
        ("adam", Box::new(Adam { betas, epsilon, decay: decay(0.1) })),
        ("sgd", Box::new(Sgd { decay: decay(0.1) })),
        ("momentum", Box::new(Momentum { momentum: 0.9, nesterov: false, decay: decay(0.1) })),
        ("nesterov", Box::new(Momentum { momentum: 0.9, nesterov: true, decay: decay(0.1) })),
        ("lion", Box::new(Lion { betas, decay: decay(0.1) })),
        ("lamb", Box::new(Lamb { betas, epsilon, decay: decay(0.1) })),
        ("adafactor", Box::new(adafactor.clone())),
        (
            "adafactor-clipped",
            Box::new(Adafactor { clip_threshold: 0.25, decay_rate: -0.5, ..adafactor.clone() }),
        ),
        ("adafactor-relative", Box::new(Adafactor { relative_step: true, ..adafactor })),
        ("muon", Box::new(muon(true, MuonRate::Original))),
        ("muon-wide", Box::new(muon(false, MuonRate::MatchRmsAdamw))),
        ("adamw-8bit", Box::new(AdamW8bit { adamw: adamw(), block_size: 16, smallest: 0 })),
        ("adamw-bf16", Box::new(AdamWBf16 { adamw: adamw(), seed: 9 })),
        (
            "groups",
            Box::new(Groups {
                groups: vec![Group {
                    patterns: vec!["b".into()],
                    rule: Box::new(Momentum {
                        momentum: 0.9,
                        nesterov: false,
                        decay: WeightDecay { rate: 0.2, except: Vec::new() },
                    }),
                    rate: 3.0,
                }],
                others: Box::new(AdamW { betas, epsilon, decay: decay(0.1) }),
            }),
        ),
    ];
    let steps: Vec<Vec<f64>> =
        golden["gradients"].as_array().expect("a list").iter().map(numbers).collect();
    for (name, rule) in rules {
        let wide = name.ends_with("wide");
        let matrix = if wide { [5, 12] } else { [12, 5] };
        let tensors = [tensor("w", &matrix, Kind::Weight), tensor("b", &[7], Kind::Bias)];
        let ranges: Vec<Range<usize>> = tensor_ranges(&tensors).collect();
        let layout = BlockStates::new(&*rule, &tensors);
        let len = 80;
        let spread = |packed: &[f64]| {
            let mut block = vec![0.0_f32; len];
            let mut packed = packed.iter();
            for range in &ranges {
                let values = block[range.clone()].iter_mut().zip(&mut packed);
                values.for_each(|(to, from)| *to = *from as f32);
            }
            block
        };
        let expected = numbers(&golden["rules"][name]);
        let rate = if name.ends_with("relative") { 0.5 } else { 0.01 };
        for (splits, level) in [(false, Level::best()), (true, Level::best())]
            .into_iter()
            .chain(Level::all().into_iter().map(|level| (false, level)))
        {
            let mut p = spread(&numbers(&golden["begin"]));
            let mut place = vec![0.0; len];
            SplitMasters::of(&mut place).split_from(&p);
            let mut states: Vec<Vec<f32>> =
                layout.lens().iter().map(|&len| vec![0.0; len]).collect();
            let mut unpacked = vec![0.0; rule.unpacked_len(60)];
            for (step, gradient) in (0..).zip(&steps) {
                let update = Update { step, learning_rate: rate, scale: 1.0, level, seed: 0 };
                let mut parts: Vec<&mut [f32]> = states.iter_mut().map(Vec::as_mut_slice).collect();
                let mut masters = match splits {
                    true => BlockMasters::Split(SplitMasters::of(&mut place)),
                    false => BlockMasters::Plain(&mut p),
                };
                let (gradient, of_block) = (spread(gradient), (&tensors[..], &layout));
                update_block(
                    &*rule,
                    of_block,
                    &mut masters,
                    &mut parts,
                    &gradient,
                    (update, &|_| 0.5),
                    &mut unpacked,
                );
            }
            if splits {
                SplitMasters::of(&mut place).join_to(&mut p);
            }
            let found = ranges.iter().flat_map(|range| &p[range.clone()]);
            for (at, (found, expected)) in found.zip(&expected).enumerate() {
                let error = (f64::from(*found) - expected).abs();
                assert!(error < 1e-5, "{name} {at} at {level:?}: {found} {expected}");
            }
        }
    }
}

fn tensor(name: &str, shape: &[usize], kind: Kind) -> Tensor {
    let (name, shape) = (name.to_string(), shape.to_vec());
    Tensor { name, shape, kind, init: Init::Zeros, joined: false }
}

/// Bits of all rules, on tensors of several chunks, do not depend on the number of threads.
#[test]
fn no_rule_depends_on_threads() {
    let decay = WeightDecay { rate: 0.1, except: Vec::new() };
    let (betas, epsilon) = ((0.9, 0.99), 1e-8);
    let adamw = AdamW { betas, epsilon, decay: decay.clone() };
    let adafactor = Adafactor {
        decay_rate: -0.8,
        epsilon: f64::from(f32::EPSILON),
        clip_threshold: 0.5,
        scale_parameter: true,
        relative_step: false,
        decay: decay.clone(),
    };
    let rules: Vec<Box<dyn UpdateRule>> = vec![
        Box::new(Lamb { betas, epsilon, decay: decay.clone() }),
        Box::new(adafactor),
        Box::new(Muon::new(0.95, true, MuonRate::Original, decay, adamw.clone())),
        Box::new(AdamW8bit { adamw: adamw.clone(), block_size: 256, smallest: 4096 }),
        Box::new(AdamWBf16 { adamw: adamw.clone(), seed: 3 }),
        Box::new(Ema { decay: 0.9, rule: Box::new(adamw) }),
    ];
    let tensors = [tensor("w", &[150, 301], Kind::Weight), tensor("b", &[20_011], Kind::Bias)];
    let len = crate::models::block_len(&tensors);
    let value = |at: usize| (at as f32 * 0.7).sin();
    for rule in rules {
        let layout = BlockStates::new(&*rule, &tensors);
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let mut p: Vec<f32> = (0..len).map(value).collect();
            let mut states: Vec<Vec<f32>> =
                layout.lens().iter().map(|&len| vec![0.0; len]).collect();
            pool.expect("threads").install(|| {
                for step in 0..3 {
                    let gradient: Vec<f32> = (0..len).map(|at| value(3 * at + step)).collect();
                    let (learning_rate, level) = (0.01, Level::best());
                    let update =
                        Update { step: step as u64, learning_rate, scale: 1.0, level, seed: 0 };
                    let mut parts: Vec<&mut [f32]> =
                        states.iter_mut().map(Vec::as_mut_slice).collect();
                    let (masters, of_block) =
                        (&mut BlockMasters::Plain(&mut p), (&tensors[..], &layout));
                    let scale = |_: &Tensor| 0.5_f32;
                    let update = (update, &scale as _);
                    update_block(&*rule, of_block, masters, &mut parts, &gradient, update, &mut []);
                }
            });
            let states: Vec<u8> =
                states.iter().flat_map(|state| bytemuck::cast_slice(state).to_vec()).collect();
            (p, states)
        };
        assert!(run(1) == run(3));
    }
}
