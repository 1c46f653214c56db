//! Blocks in pieces, which a device holds one by one: the same bits as whole blocks in as many
//! slices.

use l2l::config::{Recompute, ScheduleKind};

use crate::exact::{Case, SMALL, baseline, check_way, config};
use crate::ways::Ways;

fn case() -> Case {
    Case { layers: 2, slices: 4, dropout: 0.1, ..SMALL.clone() }
}

fn relay() -> Ways {
    let channels = l2l::config::ChannelsConfig { weights: 2, ..baseline().channels };
    Ways { kind: ScheduleKind::Relay, recompute: true.into(), channels, ..baseline() }
}

/// A device, with and without recomputation.
#[test]
fn pieces_give_the_bits_of_slices() {
    let plain = config(&case(), &baseline());
    for tensor in [1, 2, 4] {
        for recompute in [true.into(), false.into(), Recompute::ATTENTION] {
            let ways = Ways { tensor, recompute, ..relay() };
            check_way(plain.clone(), config(&case(), &ways), 3);
        }
    }
}
