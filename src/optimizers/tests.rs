//! Ten steps of each rule against goldens.

use super::*;
use crate::models::{Init, Kind, MasterFormat};

const BETAS: (f64, f64) = (0.9, 0.99);
const EPSILON: f64 = 1e-8;

/// The value between tensors, in masters and gradients. No rule may change it.
const PADDING: f32 = 9.0;

fn numbers(value: &serde_json::Value) -> Vec<f64> {
    let list = value.as_array().expect("a list").iter();
    list.map(|number| number.as_f64().expect("a number")).collect()
}

/// The rules of the goldens, by their names there.
fn golden_rules() -> Vec<(&'static str, Box<dyn UpdateRule>)> {
    let decay = || WeightDecay { rate: 0.1, except: vec!["bias".into()] };
    let adamw = || AdamW { betas: BETAS, epsilon: EPSILON, decay: decay() };
    let momentum = |nesterov| Momentum { momentum: 0.9, nesterov, decay: decay() };
    let adafactor = Adafactor {
        decay_rate: -0.8,
        epsilon: f64::from(f32::EPSILON),
        clip_threshold: 1.0,
        scale_parameter: true,
        relative_step: false,
        decay: decay(),
    };
    let clipped = Adafactor { clip_threshold: 0.25, decay_rate: -0.5, ..adafactor.clone() };
    let muon = |nesterov, rate| Muon::new(0.95, nesterov, rate, decay(), adamw());
    let of_b = WeightDecay { rate: 0.2, except: Vec::new() };
    let group = Group {
        patterns: vec!["b".into()],
        rule: Box::new(Momentum { momentum: 0.9, nesterov: false, decay: of_b }),
        rate: 3.0,
    };
    vec![
        ("adamw", Box::new(adamw())),
        ("adam", Box::new(Adam { betas: BETAS, epsilon: EPSILON, decay: decay() })),
        ("sgd", Box::new(Sgd { decay: decay() })),
        ("momentum", Box::new(momentum(false))),
        ("nesterov", Box::new(momentum(true))),
        ("lion", Box::new(Lion { betas: BETAS, decay: decay() })),
        ("lamb", Box::new(Lamb { betas: BETAS, epsilon: EPSILON, decay: decay() })),
        ("adafactor", Box::new(adafactor.clone())),
        ("adafactor-clipped", Box::new(clipped)),
        ("adafactor-relative", Box::new(Adafactor { relative_step: true, ..adafactor })),
        ("muon", Box::new(muon(true, MuonRate::Original))),
        ("muon-wide", Box::new(muon(false, MuonRate::MatchRmsAdamw))),
        ("adamw-8bit", Box::new(AdamW8bit { adamw: adamw(), block_size: 16, smallest: 0 })),
        ("adamw-bf16", Box::new(AdamWBf16 { adamw: adamw(), seed: 9 })),
        ("groups", Box::new(Groups { groups: vec![group], others: Box::new(adamw()) })),
    ]
}

/// A block of tensors that a rule trains.
struct Trained<'a> {
    rule: &'a dyn UpdateRule,
    tensors: &'a [Tensor],
    layout: BlockStates,
    states: Vec<Vec<f32>>,
    level: Level,
    /// The experts that updates leave alone.
    idle: &'a [bool],
}

impl<'a> Trained<'a> {
    fn new(rule: &'a dyn UpdateRule, tensors: &'a [Tensor], level: Level) -> Trained<'a> {
        let layout = BlockStates::new(rule, tensors);
        let states = layout.lens().iter().map(|&len| vec![0.0; len]).collect();
        Trained { rule, tensors, layout, states, level, idle: &[] }
    }

    /// An update by half of the gradient.
    fn update(
        &mut self,
        step: u64,
        masters: BlockMasters<'_>,
        gradient: &[f32],
        learning_rate: f64,
    ) {
        let mut states: Vec<&mut [f32]> = self.states.iter_mut().map(Vec::as_mut_slice).collect();
        let mut room = vec![0.0; room_len(self.rule, MasterFormat::Split, gradient.len())];
        let block = BlockUpdate {
            tensors: self.tensors,
            masters,
            states: &mut states,
            layout: &self.layout,
            gradient,
            idle: self.idle,
            room: &mut room,
        };
        let update = Update {
            step,
            block_updates: step,
            learning_rate,
            scale: 1.0,
            level: self.level,
            seed: 0,
        };
        block.run(self.rule, update, &|_| 0.5);
    }
}

/// Ten steps of each rule against `tests/goldens/optimizers.py`: PyTorch's rules, or the
/// paper's, in f64.
#[test]
fn every_rule_is_pytorchs_or_the_papers() {
    let text = include_str!("../../tests/goldens/optimizers.json");
    let golden: serde_json::Value = serde_json::from_str(text).expect("it is committed");
    let steps: Vec<Vec<f64>> =
        golden["gradients"].as_array().expect("a list").iter().map(numbers).collect();
    for (name, rule) in golden_rules() {
        let matrix = if name.ends_with("wide") { [5, 12] } else { [12, 5] };
        let tensors = [tensor("w", &matrix, Kind::Weight), tensor("b", &[7], Kind::Bias)];
        let ranges: Vec<Range<usize>> = tensor_ranges(&tensors).collect();
        let spread = |packed: &[f64]| {
            let mut block = vec![PADDING; 80];
            let mut packed = packed.iter();
            for range in &ranges {
                let values = block[range.clone()].iter_mut().zip(&mut packed);
                values.for_each(|(to, from)| *to = *from as f32);
            }
            block
        };
        let expected = numbers(&golden["rules"][name]);
        let rate = if name.ends_with("relative") { 0.5 } else { 0.01 };
        let plain = Level::all().into_iter().map(|level| (false, level));
        for (splits, level) in [(true, Level::best())].into_iter().chain(plain) {
            let mut p = spread(&numbers(&golden["begin"]));
            let mut place = vec![0.0; p.len()];
            SplitMasters::of(&mut place).split_from(&p);
            let mut trained = Trained::new(&*rule, &tensors, level);
            for (step, gradient) in (0..).zip(&steps) {
                let masters = match splits {
                    true => BlockMasters::Split(SplitMasters::of(&mut place)),
                    false => BlockMasters::Plain(&mut p),
                };
                trained.update(step, masters, &spread(gradient), rate);
            }
            if splits {
                SplitMasters::of(&mut place).join_to(&mut p);
            }
            let is_padding = |at: &usize| !ranges.iter().any(|range| range.contains(at));
            assert!((0..p.len()).filter(is_padding).all(|at| p[at] == PADDING), "{name}");
            let found = ranges.iter().flat_map(|range| &p[range.clone()]);
            for (at, (found, expected)) in found.zip(&expected).enumerate() {
                let error = (f64::from(*found) - expected).abs();
                assert!(error < 1e-5, "{name} {at} at {level:?}: {found} {expected}");
            }
        }
    }
}

fn tensor(name: &str, shape: &[usize], kind: Kind) -> Tensor {
    Tensor::new(name, shape.to_vec(), kind, Init::Zeros)
}

/// Bits of all rules, on tensors of several chunks, do not depend on the number of threads.
#[test]
fn no_rule_depends_on_threads() {
    let decay = WeightDecay { rate: 0.1, except: Vec::new() };
    let adamw = AdamW { betas: BETAS, epsilon: EPSILON, decay: decay.clone() };
    let adafactor = Adafactor {
        decay_rate: -0.8,
        epsilon: f64::from(f32::EPSILON),
        clip_threshold: 0.5,
        scale_parameter: true,
        relative_step: false,
        decay: decay.clone(),
    };
    let rules: Vec<Box<dyn UpdateRule>> = vec![
        Box::new(Lamb { betas: BETAS, epsilon: EPSILON, decay: decay.clone() }),
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
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let mut p: Vec<f32> = (0..len).map(value).collect();
            let mut trained = Trained::new(&*rule, &tensors, Level::best());
            pool.expect("threads").install(|| {
                for step in 0..3 {
                    let gradient: Vec<f32> = (0..len).map(|at| value(3 * at + step)).collect();
                    trained.update(step as u64, BlockMasters::Plain(&mut p), &gradient, 0.01);
                }
            });
            let states: Vec<u8> = trained
                .states
                .iter()
                .flat_map(|state| bytemuck::cast_slice(state).to_vec())
                .collect();
            (p, states)
        };
        assert!(run(1) == run(3));
    }
}

/// An update that leaves a tensor alone is none: masters and states have the bits of a run without
/// it, and so have later updates, whose corrections follow the count of the tensor's own updates.
/// Only an average moves on.
#[test]
fn updates_that_leave_a_tensor_alone_change_nothing_of_it() {
    let kept = Tensor { kept_with: Some(1), ..tensor("w", &[12, 5], Kind::Weight) };
    let own = [tensor("w", &[12, 5], Kind::Weight)];
    let beside = [kept, tensor("b", &[7], Kind::Bias)];
    let len = crate::models::block_len(&beside);
    let value = |at: usize| (at as f32 * 0.7).sin();
    let begin = || (0..len).map(value).collect::<Vec<f32>>();
    let mut rules = golden_rules();
    let decay = WeightDecay { rate: 0.1, except: Vec::new() };
    let adamw = AdamW { betas: BETAS, epsilon: EPSILON, decay };
    rules.push(("average", Box::new(Ema { decay: 0.9, rule: Box::new(adamw) })));
    for (name, rule) in rules {
        let mut p = begin();
        let mut alone = Trained::new(&*rule, &own, Level::best());
        let mut q = begin();
        let mut left = Trained::new(&*rule, &beside, Level::best());
        let mut average = Vec::new();
        for step in 0..6 {
            let gradient: Vec<f32> = (0..len).map(|at| value(3 * at + step)).collect();
            let is_idle = [true, false, true, true, false, false][step];
            left.idle = if is_idle { &[false, true] } else { &[true, false] };
            left.update(step as u64, BlockMasters::Plain(&mut q), &gradient, 0.01);
            if !is_idle {
                let updates = [0, 0, 1, 1, 1, 2][step];
                let masters = BlockMasters::Plain(&mut p[..60]);
                alone.update(updates, masters, &gradient[..60], 0.01);
            }
            assert_eq!(p[..60], q[..60], "{name} {step}");
            average.resize(60, 0.0);
            let share = if step == 0 { 1.0 } else { (1.0 - 0.9_f64) as f32 };
            for (average, q) in average.iter_mut().zip(&q) {
                *average = if step == 0 { *q } else { *average + (q - *average) * share };
            }
        }
        let counts = left.layout.of_tensor(0).last().expect("the count");
        assert_eq!((counts.0.name, counts.0.bytes()), ("updates", 8), "{name}");
        assert_eq!(
            left.layout.of_tensor(1).len(),
            Trained::new(&*rule, &beside[1..], Level::best()).layout.of_tensor(0).len()
        );
        let states = left.layout.of_tensor(0).iter().zip(&left.states).zip(&alone.states);
        for (((state, range), left), alone) in states {
            let expected = if state.name == Ema::NAME { &average } else { alone };
            let [left, expected] = [left, expected].map(|run| {
                bytemuck::cast_slice::<f32, u8>(&run[range.clone()]) // some are codes
            });
            assert!(left == expected, "{name} {}", state.name);
        }
        let at = counts.1.clone();
        let run = left.layout.of_tensor(0).len() - 1;
        assert_eq!(bytemuck::cast_slice::<f32, u8>(&left.states[run][at]), 3_u64.to_ne_bytes());
    }
}
