//! Operations that share a resource, such as the memory of the host: how fast each runs beside the
//! others. Operations with the same uses are one class, so that a hundred uploads cost what one
//! does.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use crate::work::Queue;

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

/// Operations that run at the same time and share resources.
#[derive(Default)]
pub(super) struct Sharing {
    classes: Vec<Class>,
    running: HashMap<Queue, Member>,
}

/// Where an operation stands: its class, and the count of the class at which it ends.
#[derive(Clone, Copy)]
struct Member {
    class: usize,
    last: Duration,
}

/// Operations with the same uses. All of them run at the same speed, so one count serves them all.
struct Class {
    uses: Vec<Use>,
    /// 1 where they run as fast as alone.
    speed: f64,
    /// At `since`: the time alone of an operation that began with the class.
    count: Duration,
    since: Duration,
    /// Those that run, by the count at which they end.
    running: BTreeSet<(Duration, Queue)>,
    /// The end that was told last.
    told: Option<(Duration, Queue)>,
}

impl Class {
    fn share_of(&self, resource: u32) -> f64 {
        let of = self.uses.iter().filter(|used| used.resource == resource);
        of.map(|used| used.share).sum::<f64>() * self.running.len() as f64
    }

    /// The count at this time.
    fn count_at(&self, now: Duration) -> Duration {
        let passed = now.saturating_sub(self.since);
        // Of operations that are not slowed, times are exact.
        self.count + if self.speed == 1.0 { passed } else { passed.mul_f64(self.speed) }
    }

    /// When the count is reached, if nothing else begins or ends before.
    fn time_of(&self, count: Duration) -> Duration {
        let left = count.saturating_sub(self.count);
        self.since + if self.speed == 1.0 { left } else { left.div_f64(self.speed) }
    }

    fn count_up(&mut self, now: Duration) {
        (self.count, self.since) = (self.count_at(now), now);
    }

    fn set(&mut self, now: Duration, speed: f64) {
        if speed != self.speed {
            self.count_up(now);
            self.speed = speed;
        }
    }
}

impl Sharing {
    /// An operation begins in this queue.
    pub(super) fn begin(&mut self, now: Duration, queue: Queue, cost: Cost) {
        let Cost { alone, uses } = cost;
        let class = self.classes.iter().position(|class| class.uses == uses).unwrap_or_else(|| {
            self.classes.push(Class {
                uses,
                speed: 1.0,
                count: Duration::ZERO,
                since: now,
                running: BTreeSet::new(),
                told: None,
            });
            self.classes.len() - 1
        });
        let of = &mut self.classes[class];
        of.count_up(now);
        let last = of.count + alone;
        of.running.insert((last, queue));
        self.running.insert(queue, Member { class, last });
        self.share(now);
    }

    /// The queue's operation ends. False: none ran there.
    pub(super) fn end(&mut self, now: Duration, queue: Queue) -> bool {
        let Some(Member { class, last }) = self.running.remove(&queue) else { return false };
        self.classes[class].running.remove(&(last, queue));
        self.share(now);
        true
    }

    /// When the queue's operation ends, if nothing else begins or ends before.
    pub(super) fn end_of(&self, queue: Queue) -> Option<Duration> {
        let &Member { class, last } = self.running.get(&queue)?;
        Some(self.classes[class].time_of(last))
    }

    /// The first end of each class, where it is another than the one told before.
    pub(super) fn first_ends(&mut self) -> impl Iterator<Item = (Duration, Queue)> {
        self.classes.iter_mut().filter_map(|class| {
            let first = class.running.first().map(|&(last, queue)| (class.time_of(last), queue));
            let before = std::mem::replace(&mut class.told, first);
            first.filter(|_| first != before)
        })
    }

    /// Sets the speeds: max-min fair. All speeds grow alike; those that use a resource stop when it
    /// is full, the others when they run as fast as alone.
    fn share(&mut self, now: Duration) {
        let running = self.classes.iter_mut().filter(|class| !class.running.is_empty());
        let mut growing: Vec<&mut Class> = running.collect();
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
            let (stopped, others) =
                growing.into_iter().partition(|one| one.share_of(resource) > 0.0);
            let stopped: Vec<&mut Class> = stopped;
            for one in stopped {
                let taken = |used: &Use| speed * used.share * one.running.len() as f64;
                full.extend(one.uses.iter().map(|used| (used.resource, taken(used))));
                one.set(now, speed);
            }
            growing = others;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::Lane;

    fn queue(device: u8) -> Queue {
        Queue { lane: Lane::Upload, device: Some(device) }
    }

    fn cost(alone: u64, uses: &[(u32, f64)]) -> Cost {
        let uses = uses.iter().map(|&(resource, share)| Use { resource, share }).collect();
        Cost { alone: Duration::from_millis(alone), uses }
    }

    fn speeds(operations: &[&[(u32, f64)]]) -> Vec<f64> {
        let mut sharing = Sharing::default();
        for (uses, number) in operations.iter().zip(0..) {
            sharing.begin(Duration::ZERO, queue(number), cost(1000, uses));
        }
        let number = 0..operations.len() as u8;
        let speed = |number| sharing.classes[sharing.running[&queue(number)].class].speed;
        number.map(|number| (speed(number) * 1e9).round() / 1e9).collect()
    }

    #[test]
    fn speeds_are_max_min_fair() {
        // Alone, or beside one that uses something else, or within what there is.
        assert_eq!(speeds(&[&[(0, 1.0)]]), [1.0]);
        assert_eq!(speeds(&[&[(0, 1.0)], &[(1, 1.0)]]), [1.0, 1.0]);
        assert_eq!(speeds(&[&[(0, 0.5)], &[(0, 0.5)]]), [1.0, 1.0]);
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
        let mut sharing = Sharing::default();
        sharing.begin(at(0), queue(0), cost(1000, &[(3, 1.0)]));
        assert_eq!(sharing.first_ends().collect::<Vec<_>>(), [(at(1000), queue(0))]);
        sharing.begin(at(500), queue(1), cost(1000, &[(3, 1.0)]));
        let ends = [0, 1].map(|number| sharing.end_of(queue(number)));
        assert_eq!(ends, [Some(at(1500)), Some(at(2500))]);
        assert_eq!(sharing.first_ends().collect::<Vec<_>>(), [(at(1500), queue(0))]);
        assert_eq!(sharing.first_ends().count(), 0, "nothing changed");
        assert!(sharing.end(at(1500), queue(0)));
        assert_eq!(sharing.first_ends().collect::<Vec<_>>(), [(at(2000), queue(1))]);
        assert!(!sharing.end(at(1500), queue(0)), "it ended before");
    }
}
