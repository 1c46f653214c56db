//! Operations that share a resource, such as the memory of the host: how fast each runs beside the
//! others.

use std::time::Duration;

/// What an operation costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// The time that it takes when it runs alone.
    pub alone: Duration,
    /// The resources that it shares with others.
    pub uses: Vec<Use>,
}

/// A resource that an operation uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Use {
    /// The number of the resource.
    pub resource: u32,
    /// The share of it that the operation takes when it runs alone: above 0, at most 1.
    pub share: f64,
}

impl From<Duration> for Cost {
    /// Of an operation that shares nothing.
    fn from(alone: Duration) -> Cost {
        Cost { alone, uses: Vec::new() }
    }
}

/// The progress of an operation that has begun.
#[derive(Debug)]
pub(super) struct Progress {
    uses: Vec<Use>,
    /// The time that it still took alone, at `since`.
    left: Duration,
    since: Duration,
    /// 1 when it runs as fast as alone.
    speed: f64,
}

impl Progress {
    pub(super) fn new(cost: Cost, now: Duration) -> Progress {
        Progress { uses: cost.uses, left: cost.alone, since: now, speed: 1.0 }
    }

    /// When it ends, if nothing else begins or ends before.
    pub(super) fn end(&self) -> Duration {
        // Of an operation that is not slowed, times are exact.
        let left = if self.speed == 1.0 { self.left } else { self.left.div_f64(self.speed) };
        self.since + left
    }

    pub(super) fn shares(&self) -> bool {
        !self.uses.is_empty()
    }

    fn share_of(&self, resource: u32) -> f64 {
        let of = self.uses.iter().filter(|used| used.resource == resource);
        of.map(|used| used.share).sum()
    }

    fn set(&mut self, now: Duration, speed: f64) {
        if speed == self.speed {
            return;
        }
        let passed = now.saturating_sub(self.since);
        let done = if self.speed == 1.0 { passed } else { passed.mul_f64(self.speed) };
        self.left = self.left.saturating_sub(done);
        (self.since, self.speed) = (now, speed);
    }
}

/// Sets the speeds of all operations that run: max-min fair. All speeds grow alike; those that use
/// a resource stop when it is full, the others when they run as fast as alone.
pub(super) fn share<'p>(now: Duration, running: impl Iterator<Item = &'p mut Progress>) {
    let mut growing: Vec<&mut Progress> = running.filter(|one| one.shares()).collect();
    let mut full: Vec<(u32, f64)> = Vec::new();
    while !growing.is_empty() {
        let mut first: Option<(f64, u32)> = None;
        let mut seen: Vec<u32> = Vec::new();
        for &Use { resource, .. } in growing.iter().flat_map(|one| &one.uses) {
            if seen.contains(&resource) {
                continue;
            }
            seen.push(resource);
            let taken = full.iter().filter(|(of, _)| *of == resource).map(|(_, taken)| taken);
            let asked = growing.iter().map(|one| one.share_of(resource)).sum::<f64>();
            let speed = (1.0 - taken.sum::<f64>()).max(0.0) / asked;
            if first.is_none_or(|(least, _)| speed < least) {
                first = Some((speed, resource));
            }
        }
        let Some((speed, resource)) = first.filter(|(speed, _)| *speed < 1.0) else {
            return growing.iter_mut().for_each(|one| one.set(now, 1.0));
        };
        let (stopped, others) = growing.into_iter().partition(|one| one.share_of(resource) > 0.0);
        let stopped: Vec<&mut Progress> = stopped;
        for one in stopped {
            full.extend(one.uses.iter().map(|used| (used.resource, speed * used.share)));
            one.set(now, speed);
        }
        growing = others;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speeds(operations: &[&[(u32, f64)]]) -> Vec<f64> {
        let progress = |uses: &&[(u32, f64)]| {
            let uses = uses.iter().map(|&(resource, share)| Use { resource, share }).collect();
            Progress::new(Cost { alone: Duration::from_secs(1), uses }, Duration::ZERO)
        };
        let mut running: Vec<Progress> = operations.iter().map(progress).collect();
        share(Duration::ZERO, running.iter_mut());
        running.iter().map(|one| (one.speed * 1e9).round() / 1e9).collect()
    }

    #[test]
    fn speeds_are_max_min_fair() {
        // Alone, or beside one that uses something else, or within what there is.
        assert_eq!(speeds(&[&[(0, 1.0)]]), [1.0]);
        assert_eq!(speeds(&[&[(0, 1.0)], &[(1, 1.0)]]), [1.0, 1.0]);
        assert_eq!(speeds(&[&[(0, 0.5)], &[(0, 0.5)], &[]]), [1.0, 1.0, 1.0]);
        // Two copies behind a root of one and a half links.
        assert_eq!(speeds(&[&[(0, 2.0 / 3.0)], &[(0, 2.0 / 3.0)]]), [0.75, 0.75]);
        // An update that takes all of the memory, beside eight uploads that take an eighth each.
        let upload: &[(u32, f64)] = &[(0, 0.125)];
        let mut operations: Vec<&[(u32, f64)]> = vec![upload; 8];
        operations.push(&[(0, 1.0)]);
        assert_eq!(speeds(&operations), [0.5; 9]);
        // Three flows over two links: the second link is full first, the first flow takes the rest.
        let flows: [&[(u32, f64)]; 4] =
            [&[(0, 1.0)], &[(0, 1.0), (1, 1.0)], &[(1, 1.0)], &[(1, 1.0)]];
        let third = 0.333_333_333;
        assert_eq!(speeds(&flows), [0.666_666_667, third, third, third]);
    }

    /// Two copies of one second on a resource that has room for one: the second begins half a
    /// second later. The first is done at 1.5, the second at 2.
    #[test]
    fn what_is_done_stays_done_when_speeds_change() {
        let at = Duration::from_millis;
        let uses = vec![Use { resource: 3, share: 1.0 }];
        let cost = Cost { alone: at(1000), uses };
        let mut running = vec![Progress::new(cost.clone(), at(0))];
        share(at(0), running.iter_mut());
        assert_eq!(running[0].end(), at(1000));
        running.push(Progress::new(cost, at(500)));
        share(at(500), running.iter_mut());
        assert_eq!((running[0].end(), running[1].end()), (at(1500), at(2500)));
        running.remove(0);
        share(at(1500), running.iter_mut());
        assert_eq!(running[0].end(), at(2000));
    }
}
