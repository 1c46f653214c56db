//! What a step is bound by: the lanes that its critical path runs on.

use std::collections::HashMap;
use std::time::Duration;

use l2l_actors::Record;
use l2l_actors::work::Lane;

/// Walks back from the operation that ended last by `to`, from each to the one whose end let it
/// begin. Returns the share of the time since `from` that the path spends on each lane, the largest
/// first. The rest is time in which the path waits for actors.
pub(super) fn bound(records: &[Record], from: Duration, to: Duration) -> Vec<(Lane, f64)> {
    let by_number: HashMap<u64, &Record> = records.iter().map(|one| (one.number, one)).collect();
    let mut spent: HashMap<Lane, Duration> = HashMap::new();
    let mut next = records.iter().filter(|record| record.end <= to).max_by_key(|one| one.end);
    while let Some(record) = next.filter(|record| record.end > from) {
        *spent.entry(record.lane).or_default() += record.end - record.begin.max(from);
        next = record.released_by.and_then(|number| by_number.get(&number).copied());
    }
    let all = to.saturating_sub(from).as_secs_f64();
    let mut shares: Vec<(Lane, f64)> =
        spent.into_iter().map(|(lane, time)| (lane, time.as_secs_f64() / all)).collect();
    shares.retain(|(_, share)| *share > 0.0);
    shares.sort_by(|(a, of_a), (b, of_b)| of_b.total_cmp(of_a).then(a.cmp(b)));
    shares
}
