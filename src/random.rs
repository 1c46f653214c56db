//! Small generators of random numbers from a seed, for initial weights, data order and masks.
//! (Dropout has its own, which also runs on devices.)

/// The distance between the states of two draws.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The next number of a stream: SplitMix64 (Steele et al. 2014).
pub(crate) fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(STEP);
    mix(*state)
}

/// The state of a stream after `count` more draws. It costs the same for any count, so threads can
/// draw parts of one stream side by side.
pub(crate) fn after(state: u64, count: u64) -> u64 {
    state.wrapping_add(count.wrapping_mul(STEP))
}

fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The next number of a stream, uniform in [0, 1).
pub(crate) fn unit(state: &mut u64) -> f64 {
    (next(state) >> 11) as f64 / (1_u64 << 53) as f64
}

/// A random number that is a function of a seed and a key.
pub(crate) fn keyed(seed: u64, key: u64) -> u64 {
    mix(seed ^ mix(key.wrapping_add(STEP)))
}

/// The place of `index` in a random permutation of `0..count`, which is a function of the key. It
/// needs no table.
///
/// A Feistel network (Luby and Rackoff 1988) permutes `0..n`, where n is the next power of four. A
/// place that is not below `count` is permuted again until it is (cycle walking).
pub(crate) fn shuffled(key: u64, count: u64, index: u64) -> u64 {
    debug_assert!(index < count);
    let half = (u64::BITS - count.saturating_sub(1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1_u64 << half) - 1;
    let mut at = index;
    loop {
        let mut left = at >> half;
        let mut right = at & mask;
        for round in 0..4 {
            let mixed = keyed(key.wrapping_add(round), right) & mask;
            (left, right) = (right, left ^ mixed);
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
    fn a_stream_goes_on_after_draws_that_were_passed_over() {
        for start in [0, 1, u64::MAX] {
            let mut state = start;
            for count in 0..100 {
                assert_eq!(after(start, count), state);
                next(&mut state);
            }
        }
    }

    #[test]
    fn a_shuffle_is_a_permutation_and_differs_by_key() {
        for count in [1, 2, 3, 10, 64, 65, 1000] {
            for key in 0..3 {
                let mut places: Vec<u64> = (0..count).map(|i| shuffled(key, count, i)).collect();
                places.sort_unstable();
                assert!(places.into_iter().eq(0..count), "{count} {key}");
            }
        }
        let order = |key| (0..1000).map(|i| shuffled(key, 1000, i)).collect::<Vec<_>>();
        assert_ne!(order(1), order(2));
        // The mean distance of neighbours in a random order is a third of the count.
        let distances: u64 = order(1).windows(2).map(|pair| pair[0].abs_diff(pair[1])).sum();
        assert!((300..370).contains(&(distances / 999)), "{distances}");
    }
}
