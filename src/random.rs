//! Small generators, where a few numbers are drawn from a seed: weights, orders, tokens.

/// The next number of a stream: SplitMix64 (Steele et al. 2014).
pub(crate) fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mix(*state)
}

fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The next number of a stream, even in [0, 1).
pub(crate) fn unit(state: &mut u64) -> f64 {
    (next(state) >> 11) as f64 / (1_u64 << 53) as f64
}

/// A number that belongs to this key of this seed.
pub(crate) fn keyed(seed: u64, key: u64) -> u64 {
    mix(seed ^ mix(key.wrapping_add(0x9e37_79b9_7f4a_7c15)))
}

/// Where `index` of `count` stands in the shuffle of a key: a permutation, without a table.
///
/// A Feistel network (Luby and Rackoff 1988) permutes the next power of four; what falls outside
/// walks on until it falls inside.
pub(crate) fn shuffled(key: u64, count: u64, index: u64) -> u64 {
    debug_assert!(index < count);
    let half = (u64::BITS - count.saturating_sub(1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1_u64 << half) - 1;
    let mut at = index;
    loop {
        let (mut left, mut right) = (at >> half, at & mask);
        for round in 0..4 {
            let turned = keyed(key.wrapping_add(round), right) & mask;
            (left, right) = (right, left ^ turned);
        }
        at = left << half | right;
        if at < count {
            return at;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_meets_each_once_and_differs_by_key() {
        for count in [1, 2, 3, 10, 64, 65, 1000] {
            for key in 0..3 {
                let mut met: Vec<u64> = (0..count).map(|i| shuffled(key, count, i)).collect();
                met.sort_unstable();
                assert!(met.into_iter().eq(0..count), "{count} {key}");
            }
        }
        let order = |key| (0..1000).map(|i| shuffled(key, 1000, i)).collect::<Vec<_>>();
        assert_ne!(order(1), order(2));
        // Neighbours are torn apart: a third of the way on average, were it random.
        let apart: u64 = order(1).windows(2).map(|pair| pair[0].abs_diff(pair[1])).sum();
        assert!((300..370).contains(&(apart / 999)), "{apart}");
    }
}
