//! The dashboard of a run with several ranks.

use super::panels::{Dashboard, Panel};

pub(super) const RANKS: Dashboard = Dashboard(
    "ranks",
    "l2l: ranks",
    &[
        Panel(
            "timeseries",
            "Steps",
            "none",
            "Training steps that each rank has done. These panels are empty for a run of one \
             process.",
            &[(r#"l2l_rank_step{run="$run"}"#, "{{rank}}")],
            12,
        ),
        Panel(
            "timeseries",
            "Computing",
            "percentunit",
            "Share of time that the compute lanes of each rank were busy, the sum of its devices. \
             In each step, all ranks wait for the slowest.",
            &[(
                "rate(l2l_rank_lane_seconds_total{run=\"$run\",lane=\"compute\"}\
                 [$__rate_interval])",
                "{{rank}}",
            )],
            12,
        ),
        Panel(
            "timeseries",
            "Waiting for the fabric",
            "percentunit",
            "Share of time that the compute lane of each rank waited for exchanges.",
            &[(
                "rate(l2l_rank_wait_seconds_total{run=\"$run\",waited_for=\"fabric\"}\
                 [$__rate_interval])",
                "{{rank}}",
            )],
            12,
        ),
        Panel(
            "timeseries",
            "The rank's time",
            "percentunit",
            "Of the chosen rank: computing (the sum of its devices), and waiting by cause (their \
             mean).",
            &[
                (
                    "rate(l2l_rank_lane_seconds_total{run=\"$run\",rank=\"$rank\",\
                     lane=\"compute\"}[$__rate_interval])",
                    "computed",
                ),
                (
                    "rate(l2l_rank_wait_seconds_total{run=\"$run\",rank=\"$rank\"}\
                     [$__rate_interval])",
                    "{{waited_for}}",
                ),
            ],
            12,
        ),
        Panel(
            "timeseries",
            "The rank's lanes",
            "percentunit",
            "Of the chosen rank: share of time that each was busy.",
            &[(
                "rate(l2l_rank_lane_seconds_total{run=\"$run\",rank=\"$rank\"}\
                 [$__rate_interval])",
                "{{lane}}",
            )],
            12,
        ),
        Panel(
            "timeseries",
            "Fabric",
            "Bps",
            "Bytes a second that each rank sent and received.",
            &[(
                r#"rate(l2l_fabric_bytes_total{run="$run"}[$__rate_interval])"#,
                "{{rank}} {{direction}}",
            )],
            12,
        ),
        Panel(
            "timeseries",
            "Resident memory",
            "bytes",
            "Of each rank's process.",
            &[(r#"l2l_rank_resident_memory_bytes{run="$run"}"#, "{{rank}}")],
            24,
        ),
    ],
);
