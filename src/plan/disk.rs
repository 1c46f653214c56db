//! The room that a run needs on disks. Places on one file system share its room.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::config::ByteSize;
use crate::error::{Misfit, Resource};
use crate::machine::{self, Disk};

/// Bytes that a run needs at a place.
#[derive(Clone, Debug)]
pub struct DiskNeed {
    /// The key of the config that names the place.
    pub key: &'static str,
    /// The place. It may not exist yet.
    pub place: PathBuf,
    /// The most bytes that are there at once.
    pub bytes: u64,
    /// Bytes of files that are there already and that the run writes over or removes.
    pub replaced: u64,
    /// The largest term of the plan, or the kind of file.
    pub term: &'static str,
    /// What the bytes are for, after the word "for".
    pub purpose: String,
    /// What makes them fewer.
    pub remedy: &'static str,
}

/// The misfits of the disks that have less room than is needed at all places on them.
pub(super) fn misfits(needs: Vec<DiskNeed>) -> Vec<Misfit> {
    let mut of_disks: BTreeMap<u64, (Disk, Vec<DiskNeed>)> = BTreeMap::new();
    for need in needs {
        let Some(disk) = machine::disk(&need.place) else { continue };
        of_disks.entry(disk.id).or_insert((disk, Vec::new())).1.push(need);
    }
    of_disks.into_values().filter_map(|(disk, needs)| misfit(disk, &needs)).collect()
}

fn misfit(disk: Disk, needs: &[DiskNeed]) -> Option<Misfit> {
    let sum = |of: fn(&DiskNeed) -> u64| needs.iter().map(of).fold(0, u64::saturating_add);
    let needed = sum(|need| need.bytes);
    let available = disk.free.saturating_add(sum(|need| need.replaced));
    if needed <= available {
        return None;
    }
    let largest = needs.iter().max_by_key(|need| need.bytes)?;
    let places = needs.iter().map(|need| format!("{} {}", need.key, need.place.display()));
    let places: Vec<String> = places.collect();
    let purposes = needs.iter().map(|need| {
        let DiskNeed { bytes, purpose, .. } = need;
        format!("{} for {purpose}", ByteSize::from(*bytes))
    });
    let purposes: Vec<String> = purposes.collect();
    let has = if places.len() == 1 { "has" } else { "are on one disk, which has" };
    let text = format!(
        "{} {has} {} free, and the run needs {}: {}, or give it another disk",
        places.join(" and "),
        ByteSize::from(available),
        purposes.join(", and "),
        largest.remedy,
    );
    Some(Misfit {
        resource: Resource::Disk,
        largest_term: Some(largest.term),
        needed,
        available,
        text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two places on one disk need the sum of their bytes.
    #[test]
    fn places_on_one_disk_share_its_room() {
        let folder = tempfile::tempdir().expect("a place for files");
        let free = machine::disk(folder.path()).expect("it is on a disk").free;
        let need = |key, share: u64| DiskNeed {
            key,
            place: folder.path().join(key).join("not/yet"),
            bytes: free / 100 * share,
            replaced: 0,
            term: "masters",
            purpose: "weights".into(),
            remedy: "write less",
        };
        assert_eq!(misfits(vec![need("one", 60)]), []);
        let all = misfits(vec![need("one", 60), need("two", 70)]);
        let [misfit] = &*all else { panic!("one disk: {all:?}") };
        let text = misfit.to_string();
        assert!(
            text.contains("one ") && text.contains("two ") && text.contains("one disk"),
            "{text}"
        );
        assert!(misfit.needed > misfit.available);
        let replaced = DiskNeed { replaced: free, ..need("two", 70) };
        assert_eq!(misfits(vec![need("one", 60), replaced]), []);
    }
}
