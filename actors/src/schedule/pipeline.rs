//! Pipelines: layers in stages, and for each device the order in which it runs them.
//!
//! A [`Pipeline`] is plain data, one list of actions for each device;
//! [`pipeline`](super::pipeline()) makes a schedule of it. Generators: GPipe (Huang et al. 2018),
//! 1F1B (Narayanan et al. 2019, PipeDream-Flush) and interleaved 1F1B (Narayanan et al. 2021), each
//! in the order of `torch.distributed.pipelining`; [`Pipeline::parse`] reads, and `Display` writes,
//! the tables that it keeps in CSV files.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::{DeviceId, MicroBatch, Phase, Refusal, Schedule, Visit};

/// The most devices of a pipeline: a [`DeviceId`] is a `u8`.
const MOST_DEVICES: usize = 255;

/// One entry of a device's list: a micro-batch passes a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Action {
    /// The stage.
    pub stage: u32,
    /// Forward or backward.
    pub phase: Phase,
    /// The micro-batch.
    pub micro_batch: MicroBatch,
}

/// The order in which each device runs its stages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pipeline {
    /// The actions of each device, in order.
    pub devices: Vec<Vec<Action>>,
}

impl Action {
    fn forward(stage: u32, micro_batch: MicroBatch) -> Action {
        Action { stage, phase: Phase::Forward, micro_batch }
    }

    fn backward(stage: u32, micro_batch: MicroBatch) -> Action {
        Action { stage, phase: Phase::Backward, micro_batch }
    }

    /// The action that must be done before this one in a pipeline of `stages` stages.
    fn needs(self, stages: u32) -> Option<Action> {
        let Action { stage, phase, micro_batch } = self;
        match phase {
            Phase::Forward => stage.checked_sub(1).map(|stage| Action { stage, ..self }),
            _ if stage + 1 == stages => Some(Action::forward(stage, micro_batch)),
            _ => Some(Action::backward(stage + 1, micro_batch)),
        }
    }
}

impl Pipeline {
    /// All forward passes, then all backward passes (GPipe). With several `chunks`, stages of one
    /// device follow each other: its first stage with all micro-batches, then its next stage.
    pub fn gpipe(devices: u32, chunks: u32, micro_batches: MicroBatch) -> Pipeline {
        let of_device = |device: u32| -> Vec<Action> {
            let stage = |chunk: u32| chunk * devices + device;
            let all = |stage| (0..micro_batches).map(move |m| Action::forward(stage, m));
            let forward = (0..chunks).flat_map(|chunk| all(stage(chunk)));
            let back = |action| Action { phase: Phase::Backward, ..action };
            let backward = (0..chunks).rev().flat_map(|chunk| all(stage(chunk)).map(back));
            forward.chain(backward).collect()
        };
        Pipeline { devices: (0..devices).map(of_device).collect() }
    }

    /// One forward pass, one backward pass, by turns, once each device has as many micro-batches on
    /// their way as there are devices behind it.
    pub fn one_forward_one_backward(devices: u32, micro_batches: MicroBatch) -> Pipeline {
        let rounds = Rounds { devices, chunks: 1, micro_batches, round: micro_batches.max(1) };
        rounds.by_turns(1)
    }

    /// 1F1B with several stages on each device, `chunks` of them: stage `s` is on device `s` modulo
    /// `devices`. Micro-batches go through in rounds of about as many as there are devices.
    ///
    /// # Errors
    /// The rounds do not come out even.
    pub fn interleaved(
        devices: u32,
        chunks: u32,
        micro_batches: MicroBatch,
    ) -> Result<Pipeline, Refusal> {
        let rounds = Rounds::new(devices, chunks, micro_batches)?;
        Ok(rounds.by_turns(2))
    }

    /// The same stages on the same devices, without backward passes, for this number of
    /// micro-batches.
    pub fn forward_only(&self, micro_batches: MicroBatch) -> Pipeline {
        let of_device = |actions: &Vec<Action>| -> Vec<Action> {
            let stages: BTreeSet<u32> = actions.iter().map(|action| action.stage).collect();
            let all = |stage| (0..micro_batches).map(move |m| Action::forward(stage, m));
            stages.into_iter().flat_map(all).collect()
        };
        Pipeline { devices: self.devices.iter().map(of_device).collect() }
    }

    /// The order of a schedule that runs already; each layer of a device, or piece of one, is a
    /// stage. Keys that are computed again are left out, as a part of the backward pass, and so is
    /// the reference, as a part of the forward pass.
    pub fn of(schedule: &Schedule) -> Pipeline {
        let stops: BTreeSet<_> = schedule.device_visits().map(Visit::stop).collect();
        let stage_of: BTreeMap<_, u32> = stops.into_iter().zip(0..).collect();
        let mut devices = vec![Vec::new(); schedule.devices() as usize];
        let mut begun = BTreeSet::new();
        let is_pass = |visit: &&Visit| matches!(visit.phase, Phase::Forward | Phase::Backward);
        for visit in schedule.device_visits().filter(is_pass) {
            let list: &mut Vec<Action> = &mut devices[usize::from(visit.device().unwrap_or(0))];
            for micro_batch in schedule.units(visit) {
                let action =
                    Action { stage: stage_of[&visit.stop()], phase: visit.phase, micro_batch };
                let forward = Action { phase: Phase::Forward, ..action };
                if begun.insert(forward) && action != forward {
                    list.push(forward); // its forward is a part of this visit
                }
                list.push(action);
            }
        }
        Pipeline { devices }
    }

    /// Reads a table as `torch.distributed.pipelining` writes it: a row for each device, in it
    /// actions such as `2F0` (stage, phase, micro-batch) with `F` forward and `B` backward. Empty
    /// places and communication (`SEND_F`, `UNSHARD`, …) are passed over.
    ///
    /// # Errors
    /// An entry is no action. The error names its row and place.
    pub fn parse(text: &str) -> Result<Pipeline, Refusal> {
        let mut devices = Vec::new();
        for (row, line) in (1..).zip(text.lines()) {
            let mut actions = Vec::new();
            for (place, entry) in (1..).zip(line.split(',')) {
                let entry = entry.trim().trim_matches('"');
                let action = parse_action(entry).ok_or_else(|| {
                    let example = "an action is a stage, F or B, and a micro-batch, as in 2F0; a \
                                   backward pass is not split in I and W";
                    Refusal::of(format!("row {row}, place {place}: {entry:?} ({example})"))
                })?;
                actions.extend(action);
            }
            devices.push(actions);
        }
        Ok(Pipeline { devices })
    }

    /// Stages up to the last one that is named.
    pub fn stages(&self) -> u32 {
        let all = self.devices.iter().flatten();
        all.map(|action| action.stage.saturating_add(1)).max().unwrap_or(0)
    }

    /// The device of each stage.
    ///
    /// # Errors
    /// A stage that is on two devices, or on none.
    pub(super) fn places(&self) -> Result<Vec<DeviceId>, Refusal> {
        let mut places = BTreeMap::new();
        for (device, actions) in (0..).zip(&self.devices) {
            for &Action { stage, .. } in actions {
                let place = *places.entry(stage).or_insert(device);
                if place != device {
                    let reason = format!("stage {stage} is on devices {place} and {device}");
                    return Err(Refusal::of(reason));
                }
            }
        }
        match (0..).zip(places.keys()).find(|(next, stage)| next != *stage) {
            Some((missing, _)) => Err(Refusal::of(format!("stage {missing} is on no device"))),
            None => Ok(places.into_values().collect()),
        }
    }

    /// Every stage meets every micro-batch once in each phase, and in order.
    pub(super) fn check(&self, micro_batches: MicroBatch, trains: bool) -> Result<(), Refusal> {
        let devices = self.devices.len();
        if self.stages() == 0 || devices > MOST_DEVICES {
            return Err(Refusal::of(format!(
                "a pipeline has 1 to {MOST_DEVICES} devices and at least one stage, not {devices} \
                 and {}",
                self.stages()
            )));
        }
        let mut next = BTreeMap::new(); // (stage, phase) -> micro-batch
        for action in self.devices.iter().flatten() {
            if matches!(action.phase, Phase::Keys | Phase::Reference) {
                let reason = format!("{action} is no pass of a pipeline, which has F and B alone");
                return Err(Refusal::of(reason));
            }
            let expected = next.entry((action.stage, action.phase)).or_insert(0);
            if action.micro_batch != *expected || *expected == micro_batches {
                let rule =
                    "each stage takes its micro-batches in order, in which gradients are summed";
                return Err(Refusal::of(format!(
                    "{action} comes where micro-batch {expected} would, of {micro_batches}: {rule}"
                )));
            }
            *expected += 1;
        }
        let phases = [Phase::Forward, Phase::Backward];
        let phases = if trains { &phases[..] } else { &phases[..1] };
        for stage in 0..self.stages() {
            for &phase in phases {
                let has = next.get(&(stage, phase)).copied().unwrap_or(0);
                if has < micro_batches {
                    let missing = Action { stage, phase, micro_batch: has };
                    return Err(Refusal::of(format!("{missing} is missing")));
                }
            }
        }
        Ok(())
    }

    /// All actions in an order in which each can begin, as early as it can.
    ///
    /// # Errors
    /// The devices wait for each other. The error names what each of them waits for.
    pub(super) fn in_order(&self) -> Result<Vec<(DeviceId, Action)>, Refusal> {
        let stages = self.stages();
        let mut at = vec![0; self.devices.len()];
        let mut done = BTreeSet::new();
        let mut order = Vec::new();
        loop {
            let before = order.len();
            for (device, actions) in self.devices.iter().enumerate() {
                let Some(&action) = actions.get(at[device]) else { continue };
                if action.needs(stages).is_none_or(|needed| done.contains(&needed)) {
                    order.push((device as DeviceId, action));
                    at[device] += 1;
                }
            }
            if order.len() == before {
                break;
            }
            done.extend(order[before..].iter().map(|&(_, action)| action));
        }
        let mut waiting = Vec::new();
        for (device, (actions, &at)) in self.devices.iter().zip(&at).enumerate() {
            if let Some(action) = actions.get(at) {
                let needed = action.needs(stages).expect("what needs nothing can begin");
                waiting.push(format!("device {device} waits with {action} for {needed}"));
            }
        }
        if waiting.is_empty() {
            Ok(order)
        } else {
            Err(Refusal::of(format!("the pipeline cannot end: {}", waiting.join(", "))))
        }
    }
}

/// The passes of a device with several stages, in rounds.
#[derive(Clone, Copy)]
struct Rounds {
    devices: u32,
    chunks: u32,
    micro_batches: MicroBatch,
    /// Micro-batches of a round.
    round: MicroBatch,
}

impl Rounds {
    fn new(devices: u32, chunks: u32, micro_batches: MicroBatch) -> Result<Rounds, Refusal> {
        if devices == 0 || chunks == 0 {
            return Err(Refusal::of("a pipeline has devices, and stages on each"));
        }
        let count = (micro_batches / devices).max(1);
        if !micro_batches.is_multiple_of(count) {
            let reason = format!(
                "an interleaved pipeline of {devices} devices has {count} rounds for \
                 {micro_batches} micro-batches, which must be a multiple of that"
            );
            return Err(Refusal::of(reason));
        }
        Ok(Rounds { devices, chunks, micro_batches, round: micro_batches / count })
    }

    /// Passes of a device, each way.
    fn all(&self) -> u32 {
        self.micro_batches * self.chunks
    }

    /// The list of each device. First come the forward passes that run before the first backward
    /// pass can: a round for each further chunk, and `hops` passes for each later device. Then a
    /// forward pass and a backward pass take turns.
    fn by_turns(&self, hops: u32) -> Pipeline {
        let of_device = |device: u32| -> Vec<Action> {
            let behind = hops * (self.devices - 1 - device);
            let ahead = ((self.chunks - 1) * self.round + behind).min(self.all());
            let mut actions: Vec<Action> = (0..ahead).map(|at| self.forward(device, at)).collect();
            for at in 0..self.all() {
                let next = Some(at + ahead).filter(|&next| next < self.all());
                actions.extend(next.map(|next| self.forward(device, next)));
                actions.push(self.backward(device, at));
            }
            actions
        };
        Pipeline { devices: (0..self.devices).map(of_device).collect() }
    }

    /// The chunk and its micro-batch in pass number `at`.
    fn nth(&self, at: u32) -> (u32, MicroBatch) {
        let turn = at / self.round;
        let within = at % self.round;
        (turn % self.chunks, turn / self.chunks * self.round + within)
    }

    fn forward(&self, device: u32, at: u32) -> Action {
        let (chunk, m) = self.nth(at);
        Action::forward(chunk * self.devices + device, m)
    }

    fn backward(&self, device: u32, at: u32) -> Action {
        let (chunk, m) = self.nth(at);
        Action::backward((self.chunks - 1 - chunk) * self.devices + device, m)
    }
}

/// `Some(None)`: an entry that is no computation. `None`: the entry is not known.
fn parse_action(entry: &str) -> Option<Option<Action>> {
    if entry.is_empty() {
        return Some(None);
    }
    let (stage, rest) = entry.split_at(entry.find(|c: char| !c.is_ascii_digit())?);
    let (what, micro_batch) =
        rest.split_at(rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len()));
    let stage: u32 = stage.parse().ok().filter(|&stage| stage <= 1 << 20)?;
    let phase = match what {
        "F" => Phase::Forward,
        "B" => Phase::Backward,
        "SEND_F" | "SEND_B" | "RECV_F" | "RECV_B" | "UNSHARD" | "RESHARD" | "REDUCE_GRAD"
        | "WAIT_REDUCE_GRAD" | "WAIT_SEND_F" | "WAIT_SEND_B" => return Some(None),
        _ => return None,
    };
    Some(Some(Action { stage, phase, micro_batch: micro_batch.parse().ok()? }))
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phase = match self.phase {
            Phase::Forward => 'F',
            Phase::Reference => 'R',
            Phase::Keys => 'K',
            Phase::Backward => 'B',
        };
        write!(f, "{}{phase}{}", self.stage, self.micro_batch)
    }
}

impl fmt::Display for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for actions in &self.devices {
            let actions: Vec<String> = actions.iter().map(Action::to_string).collect();
            writeln!(f, "{}", actions.join(","))?;
        }
        Ok(())
    }
}
