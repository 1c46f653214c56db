//! Packing: several short sequences become one, as documents that do not attend to each other.

use std::collections::BTreeMap;

use super::Sequence;

/// Packs sequences of these lengths into sequences of at most `most` tokens. Returns, for each
/// packed sequence, the indices of the sequences that it joins.
///
/// Sequences are taken in order, and each goes where it leaves the least room (best fit). So a
/// packed sequence joins sequences that are close to each other in the data.
pub(super) fn pack(lengths: impl Iterator<Item = usize>, most: usize) -> Vec<Vec<u32>> {
    let mut packed: Vec<Vec<u32>> = Vec::new();
    // By remaining room, the indices in `packed`.
    let mut open: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (index, length) in lengths.enumerate() {
        let (place, room) = match open.range_mut(length..).next() {
            Some((&room, places)) => {
                let place = places.pop().expect("empty lists are removed");
                if places.is_empty() {
                    open.remove(&room);
                }
                (place, room)
            }
            None => {
                packed.push(Vec::new());
                (packed.len() - 1, most)
            }
        };
        packed[place].push(index as u32);
        if let Some(room) = room.checked_sub(length).filter(|&room| room > 0) {
            open.entry(room).or_default().push(place);
        }
    }
    packed
}

/// Joins sequences into one. With `attend_across` the result is one document, as if all were one
/// text.
pub(super) fn join(sequences: Vec<Sequence>, attend_across: bool) -> Sequence {
    let mut joined = Sequence::default();
    let has_kinds = sequences.iter().any(|one| !one.kinds.is_empty());
    for one in &sequences {
        joined.tokens.extend(&one.tokens);
        joined.labels.extend(&one.labels);
        if has_kinds && one.kinds.is_empty() {
            joined.kinds.resize(joined.tokens.len(), 0);
        }
        joined.kinds.extend(&one.kinds);
        joined.documents.extend((!attend_across).then_some(one.tokens.len()));
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_packed_once_and_nothing_overflows() {
        let lengths = [5, 3, 8, 2, 2, 7, 1, 1, 8, 4, 4];
        let packed = pack(lengths.into_iter(), 8);
        let mut all: Vec<u32> = packed.concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..lengths.len() as u32));
        let full = |one: &Vec<u32>| one.iter().map(|&at| lengths[at as usize]).sum::<usize>();
        assert!(packed.iter().all(|one| full(one) <= 8), "{packed:?}");
        assert_eq!(packed.len(), 6, "{packed:?}");
        assert_eq!(packed[0], [0, 1]);
    }
}
