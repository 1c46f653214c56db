//! `stash.place = "auto"` across a link: what the next visit of a device reads stays there, and
//! layers that compute little go in rounds with a neighbour. The bits are those of everything else,
//! and fewer bytes cross the link, as many as the plan says.

use l2l::config::{ChannelsConfig, Deal, Dtype, MasterDtype, Recompute, ScheduleKind, StashPlace};
use l2l::models::Base;
use l2l::plan::{LinkBytes, Plan};
use l2l::{Config, model_of, shape_of};

use crate::exact::{
    Case, SMALL, Ways, baseline, check_links, config, long_sequences, planned, run,
};
use crate::plan::limit;
use crate::trained::Trained;

/// A relay whose boundaries are copied over an emulated link.
fn ways(place: StashPlace) -> Ways {
    let channels = ChannelsConfig { weights: 2, ..baseline().channels };
    let recompute = true.into();
    Ways { kind: ScheduleKind::Relay, link: true, channels, place, recompute, ..baseline() }
}

fn plan_of(config: &Config) -> Plan {
    let model = model_of(config, shape_of(config).expect("a shape of ours"));
    let model = model.expect("a model of ours");
    Plan::new(config, &model, &config.update_rule()).expect("a plan of ours")
}

fn cases() -> Vec<Case> {
    let plain = || Case { layers: 3, batch: 4, dropout: 0.1, ..SMALL.clone() };
    let bf16 = (Dtype::Bf16, MasterDtype::Split);
    let adapters = |base| Case { trained: Trained::Adapters, base, precision: bf16, ..plain() };
    vec![
        plain(),
        Case { clip: true, groups: 2, ..plain() },
        Case { layers: 1, tied_tiles: true, ..plain() },
        Case { precision: bf16, ..plain() },
        Case { experts: Some([4, 2]), ..plain() },
        adapters(Base::AsIs),
        adapters(Base::Nf4),
        Case { slices: 2, dropout: 0.0, ..plain() },
    ]
}

/// One micro-batch a step, one a group, and several; one weight slot and more; none, some and all
/// layers with kept activations; devices that have layers or groups. Without the whole search, each
/// case is run in some of these ways.
#[test]
fn what_stays_changes_no_bits() {
    let mut number = 0;
    for case in cases() {
        for micro_batch in [case.micro_batch, case.batch] {
            let groups = if micro_batch == case.batch { 1 } else { case.groups };
            let case = Case { micro_batch, groups, ..case.clone() };
            let (expected, reference) = run(config(&case, &baseline()), 2);
            let auto = ways(StashPlace::Auto);
            let one_slot = ChannelsConfig { weights: 1, ..auto.channels };
            let room = |room| Ways { recompute: Recompute::AUTO, room, ..auto.clone() };
            let all = [
                auto.clone(),
                Ways { channels: one_slot, recompute: false.into(), ..auto.clone() },
                room(0.5),
                room(1.0),
                Ways { devices: 2, deal: Deal::Layers, ..auto.clone() },
                Ways { devices: 2, deal: Deal::Sequences, ..auto.clone() },
                Ways { tensor: 2, bundles: Some(1), on_file: true, ..auto.clone() },
            ];
            for ways in all.map(|ways| ways.for_case(&case)) {
                number += 1;
                if !crate::whole() && number % 5 != 0 {
                    continue;
                }
                let config = config(&case, &ways);
                let (bits, summary) = run(config.clone(), 2);
                assert_eq!(bits, expected, "{case:?} {ways:?}");
                assert_eq!(summary.weights_digest, reference.weights_digest, "{case:?} {ways:?}");
                check_links(&config, 2, &summary.links);
            }
        }
    }
}

/// The chunks of long sequences go as they did. A smaller step than the plan's may have no room on
/// the device, and then its boundaries wait on the host.
#[test]
fn what_has_no_room_waits_on_the_host() {
    let folder = tempfile::tempdir().expect("a place for files");
    let data = long_sequences(folder.path());
    let of = |ways: &Ways, batch: usize, chunk_positions: usize| {
        let case = Case { layers: 2, batch, dropout: 0.0, ..SMALL.clone() };
        let mut config = config(&case, ways);
        (config.model.hidden, config.model.heads) = (Some(8), Some(1));
        (config.model.positions, config.data.sequence_length) = (Some(400), Some(400));
        config.step.chunk_positions = chunk_positions;
        config.data.train = data.display().to_string().into();
        limit(&mut config, ways.room);
        let (bits, summary) = run(config, 3);
        (bits, summary.weights_digest)
    };
    for (batch, chunk_positions) in [(2, 128), (3, 128), (4, 512)] {
        let expected = of(&baseline(), batch, chunk_positions);
        assert_eq!(of(&ways(StashPlace::Auto), batch, chunk_positions), expected, "{batch}");
    }
}

/// With one micro-batch, hidden states go to the stash for the backward pass alone, and their
/// gradients do not leave the device. The device holds little more for it, however deep the model.
#[test]
fn one_micro_batch_stays_on_the_device() {
    let of = |layers: usize, place: StashPlace, micro_batch: usize| {
        let case = Case { layers, batch: 4, micro_batch, dropout: 0.0, ..SMALL.clone() };
        let config = config(&case, &ways(place));
        let kept: u64 = plan_of(&config).device.iter().map(|term| term.bytes).sum();
        (planned(&config, 1)[0], kept)
    };
    let hidden = 4 * 7 * 24 * 4; // bytes of a hidden state of all sequences
    let [three, four] = [3, 4].map(|layers| of(layers, StashPlace::Auto, 4));
    let [all_three, all_four] = [3, 4].map(|layers| of(layers, StashPlace::Host, 4));
    // A further layer copies its block, its input up once and down once, and no gradient.
    let more = |a: LinkBytes, b: LinkBytes| [b.upload - a.upload, b.download - a.download];
    let [auto_up, auto_down] = more(three.0, four.0);
    let [host_up, host_down] = more(all_three.0, all_four.0);
    assert_eq!(host_up - auto_up, 2 * hidden);
    assert_eq!(host_down - auto_down, hidden);
    assert_eq!(four.1 - all_four.1, three.1 - all_three.1);
    // A ceiling just below says what would fit.
    let case = Case { layers: 3, batch: 4, micro_batch: 4, dropout: 0.0, ..SMALL.clone() };
    let mut limited = config(&case, &ways(StashPlace::Auto));
    for (ceiling, would_fit) in [(three.1 - 1, true), (all_three.1 - 1, false)] {
        limited.device.memory = ceiling.to_string().parse().expect("a size");
        let model = model_of(&limited, shape_of(&limited).expect("ours")).expect("a model of ours");
        let misfits = plan_of(&limited).misfits(&model, &limited.update_rule(), None);
        let text = misfits[0].to_string();
        assert_eq!(text.contains("stash.place = \"host\" would fit"), would_fit, "{text}");
    }
    // Where kernels reach the stash, nothing is copied.
    let [auto, host] = [StashPlace::Auto, StashPlace::Host].map(|place| {
        let case = Case { layers: 3, batch: 4, micro_batch: 4, ..SMALL.clone() };
        let config = config(&case, &Ways { link: false, ..ways(place) });
        (planned(&config, 1), plan_of(&config).device)
    });
    assert_eq!(auto, host);
}
