//! The alerts: what each means and asks for, and series that fire it or leave it silent.

/// A rank computes for much longer than another, and a rank waits for the fabric.
macro_rules! rank_slow {
    () => {
        "(max by (run) (rate(l2l_rank_lane_seconds_total{lane=\"compute\"}[5m])) > 1.5 * min by \
         (run) (rate(l2l_rank_lane_seconds_total{lane=\"compute\"}[5m]))) and on (run) (max by \
         (run) (rate(l2l_rank_wait_seconds_total{waited_for=\"fabric\"}[5m])) > 0.25)"
    };
}

/// A series for promtool: its name with labels, and its values a minute apart.
type Series = (&'static str, &'static str);

/// An alert.
pub(super) struct Alert {
    pub(super) name: &'static str,
    pub(super) expression: &'static str,
    pub(super) after: &'static str,
    pub(super) severity: &'static str,
    pub(super) summary: &'static str,
    pub(super) means: &'static str,
    pub(super) todo: &'static [&'static str],
    pub(super) fires: &'static [Series],
    pub(super) silent: &'static [Series],
}

pub(super) const ALERTS: &[Alert] = &[
    Alert {
        name: "L2lStalled",
        expression: "(time() - l2l_last_step_timestamp_seconds > 60 + 5 * l2l_step_seconds_sum / \
            clamp_min(l2l_step_seconds_count, 1) + 600 * (l2l_step_seconds_count == bool \
            0)) and on (run) (sum by (run) \
            (l2l_state{state=~\"training|validating|checkpointing\"}) == 1) and on (run) (l2l_step \
            != l2l_steps_target or on (run) sum by (run) \
            (l2l_state{state=~\"validating|checkpointing\"}) == 1)",
        after: "1m",
        severity: "critical",
        summary: "no step for five times as long as a step takes",
        means: "The run is training, validating or writing a checkpoint, and its last step \
            ended more than a minute and five mean steps ago (the first step has ten \
            minutes more). If nothing moved at all, the watchdog (`watchdog.seconds`) would \
            have ended the run. So something moves very slowly: the machine is busy with \
            something else, or a disk does not answer.",
        todo: &[
            "Open the live page or the dashboard *l2l: channels*: which actor is starved, \
            which is blocked?",
            "`l2l_lane_seconds_total` shows which lane still works.",
            "Check the machine: swapped memory, other processes, a disk that hangs.",
            "If you stopped the process (with a debugger or `SIGSTOP`), let it continue.",
        ],
        fires: &[
            ("l2l_last_step_timestamp_seconds{run=\"r\"}", "0x20"),
            ("l2l_step_seconds_sum{run=\"r\"}", "10x20"),
            ("l2l_step_seconds_count{run=\"r\"}", "10x20"),
            ("l2l_state{run=\"r\",state=\"training\"}", "1x20"),
            ("l2l_step{run=\"r\"}", "10x20"),
            ("l2l_steps_target{run=\"r\"}", "90x20"),
        ],
        silent: &[
            ("l2l_last_step_timestamp_seconds{run=\"r\"}", "0+60x20"),
            ("l2l_step_seconds_sum{run=\"r\"}", "10+60x20"),
            ("l2l_step_seconds_count{run=\"r\"}", "10+60x20"),
            ("l2l_state{run=\"r\",state=\"training\"}", "1x20"),
            ("l2l_step{run=\"r\"}", "10+1x20"),
            ("l2l_steps_target{run=\"r\"}", "90x20"),
            // All steps are done: it writes a sample.
            ("l2l_last_step_timestamp_seconds{run=\"done\"}", "0x20"),
            ("l2l_step_seconds_sum{run=\"done\"}", "10x20"),
            ("l2l_step_seconds_count{run=\"done\"}", "10x20"),
            ("l2l_state{run=\"done\",state=\"training\"}", "1x20"),
            ("l2l_step{run=\"done\"}", "90x20"),
            ("l2l_steps_target{run=\"done\"}", "90x20"),
        ],
    },
    Alert {
        name: "L2lExposedWaitHigh",
        expression: concat!(
            "(l2l:exposed_wait:ratio > 0.25) unless on (run) (l2l:bottleneck:share{bottleneck=~\
             \"upload|download|update|host|disk\"} > 0.25) unless on (run) (",
            rank_slow!(),
            ")"
        ),
        after: "5m",
        severity: "warning",
        summary: "the device is idle for more than a quarter of the time, for no single reason",
        means: "The compute lane waits within steps, and no other alert explains it: L2lLinkBound, \
            L2lUpdateBound, L2lDiskBound and L2lRankSlow take its place. `l2l:wait:share` shows \
            what it waits for: several things, `devices`, or `fabric`.",
        todo: &[
            "Run `l2l tune CONFIG.toml`: it tries channel depths, micro-batches and places \
            of the stash.",
            "upload: raise `channels.weights` from 1 to 2, or `step.batch`, so that each \
            visit is longer.",
            "download: raise `channels.gradients`, or set `stash.place = \"device\"`.",
            "update: raise `channels.reduced` or `step.batch`, or set `optimizer.clip_norm`, \
            which moves updates under the next forward pass.",
            "host: raise `step.micro_batch`, so that there are fewer operations.",
        ],
        fires: &[
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"upload\"}", "0+10x20"),
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"download\"}", "0+10x20"),
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"update\"}", "0+10x20"),
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"outside\"}", "0+1x20"),
            (
                "l2l_device_lane_seconds_total{run=\"r\",device=\"cpu0\",lane=\"compute\"}",
                "0+29x20",
            ),
        ],
        silent: &[
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"upload\"}", "0+3x20"),
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"outside\"}", "0+1x20"),
            (
                "l2l_device_lane_seconds_total{run=\"r\",device=\"cpu0\",lane=\"compute\"}",
                "0+56x20",
            ),
        ],
    },
    Alert {
        name: "L2lLinkBound",
        expression: "sum by (run) (l2l:bottleneck:share{bottleneck=~\"upload|download\"}) > 0.25",
        after: "5m",
        severity: "warning",
        summary: "transfers slow the run down",
        means: "The compute lane waits for transfers over the link for more than a quarter of \
            the time. `l2l:wait:share{run=\"...\"}` says whether for uploads or downloads, and \
            `sort(l2l:layer_overlap:ratio{run=\"...\"})` at which layers. All look back five \
            minutes: after a change, judge by `l2l:exposed_wait:ratio` five minutes later.",
        todo: &[
            "Run `l2l tune CONFIG.toml --to tuned.toml`: it tries the settings below together, \
            and what helps is often several of them.",
            "Raise `step.batch`: visits become longer, and each block crosses the link as \
            often as before.",
            "upload: set `channels.weights = 2`, so that a block arrives while the layer before \
            it computes, and raise `channels.stash`, so that activations do.",
            "download: raise `channels.gradients` and `channels.reduced`.",
            "Set `stash.place = \"device\"` if the device has the memory: activations then \
            do not cross the link.",
        ],
        fires: &[
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"host\"}", "0+1x20"),
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"ring\"}", "0+1x20"),
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"upload\"}", "0+30x20"),
            // Waits are a mean over the devices.
            (
                "l2l_device_lane_seconds_total{run=\"r\",device=\"cpu0\",lane=\"compute\"}",
                "0+30x20",
            ),
            (
                "l2l_device_lane_seconds_total{run=\"r\",device=\"cpu1\",lane=\"compute\"}",
                "0+30x20",
            ),
            (
                "l2l_device_lane_seconds_total{run=\"r\",device=\"cpu2\",lane=\"compute\"}",
                "0+30x20",
            ),
        ],
        silent: &[
            // Bound until it ended, and not there any more.
            ("l2l_compute_wait_seconds_total{run=\"gone\",waited_for=\"upload\"}", "0+30x5"),
            (
                "l2l_device_lane_seconds_total{run=\"gone\",device=\"cpu0\",lane=\"compute\"}",
                "0+30x5",
            ),
            ("l2l_step{run=\"gone\"}", "1x5 stale"),
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"update\"}", "0+30x20"),
            (
                "l2l_device_lane_seconds_total{run=\"r\",device=\"cpu0\",lane=\"compute\"}",
                "0+30x20",
            ),
        ],
    },
    Alert {
        name: "L2lUpdateBound",
        expression: "sum by (run) (l2l:bottleneck:share{bottleneck=~\"update|host\"}) > 0.25",
        after: "5m",
        severity: "warning",
        summary: "updates or sums on the host slow the run down",
        means: "The compute lane waits for updates or for other work of the host for more than \
            a quarter of the time.",
        todo: &[
            "Raise `step.batch`: there are as many updates, for more tokens.",
            "Raise `channels.reduced` and `channels.gradients`: more gradients can wait \
            without stopping the device.",
            "Set `optimizer.clip_norm`: updates then run under the next forward pass.",
        ],
        fires: &[
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"update\"}", "0+30x20"),
            (
                "l2l_device_lane_seconds_total{run=\"r\",device=\"cpu0\",lane=\"compute\"}",
                "0+30x20",
            ),
        ],
        silent: &[
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"upload\"}", "0+30x20"),
            (
                "l2l_device_lane_seconds_total{run=\"r\",device=\"cpu0\",lane=\"compute\"}",
                "0+30x20",
            ),
        ],
    },
    Alert {
        name: "L2lDiskBound",
        expression: "sum by (run) (l2l:bottleneck:share{bottleneck=\"disk\"}) > 0.25",
        after: "5m",
        severity: "warning",
        summary: "the disk slows the run down",
        means: "More than a quarter of the time goes to checkpoints, or to waiting for the file \
            of `eps.tier = \"file\"`, and more than to any other wait of the compute lane.",
        todo: &[
            "Raise `checkpoint.every_steps`.",
            "With `eps.tier = \"file\"`: raise `step.batch`, so that reads and writes are \
            hidden. `l2l plan --forecast` prints how many tokens a step that takes.",
            "Move `checkpoint.directory` or `eps.path` to a faster disk; `l2l doctor` \
            measures one.",
        ],
        fires: &[
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"upload\"}", "0+3x20"),
            (
                "l2l_device_lane_seconds_total{run=\"r\",device=\"cpu0\",lane=\"compute\"}",
                "0+20x20",
            ),
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"file\"}", "0+20x20"),
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"checkpoint\"}", "0+10x20"),
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"outside\"}", "0+7x20"),
        ],
        silent: &[
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"upload\"}", "0+3x20"),
            (
                "l2l_device_lane_seconds_total{run=\"r\",device=\"cpu0\",lane=\"compute\"}",
                "0+50x20",
            ),
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"file\"}", "0+3x20"),
        ],
    },
    Alert {
        name: "L2lRankSlow",
        expression: rank_slow!(),
        after: "5m",
        severity: "warning",
        summary: "ranks wait for one that computes much longer than others",
        means: "All ranks do a step together. One of them computes half as long again as another, \
            or longer, and a rank waits for the fabric for more than a quarter of the time.",
        todo: &[
            "Open the dashboard *l2l: ranks*: the rank whose compute lane is busiest is the slow \
            one.",
            "If it is always the same rank: check its machine for other processes, for heat, and \
            for a slower device.",
            "If `parallel.groups` is not the number of ranks times a power of two, some ranks \
            compute more groups than others: choose another number for the next run.",
        ],
        fires: &[
            ("l2l_rank_lane_seconds_total{run=\"r\",rank=\"0\",lane=\"compute\"}", "0+50x20"),
            ("l2l_rank_lane_seconds_total{run=\"r\",rank=\"1\",lane=\"compute\"}", "0+25x20"),
            ("l2l_rank_wait_seconds_total{run=\"r\",rank=\"0\",waited_for=\"fabric\"}", "0+5x20"),
            ("l2l_rank_wait_seconds_total{run=\"r\",rank=\"1\",waited_for=\"fabric\"}", "0+30x20"),
            ("l2l_compute_wait_seconds_total{run=\"r\",waited_for=\"fabric\"}", "0+20x20"),
            (
                "l2l_device_lane_seconds_total{run=\"r\",device=\"cpu0\",lane=\"compute\"}",
                "0+40x20",
            ),
        ],
        silent: &[
            ("l2l_rank_lane_seconds_total{run=\"r\",rank=\"0\",lane=\"compute\"}", "0+30x20"),
            ("l2l_rank_lane_seconds_total{run=\"r\",rank=\"1\",lane=\"compute\"}", "0+25x20"),
            ("l2l_rank_wait_seconds_total{run=\"r\",rank=\"0\",waited_for=\"fabric\"}", "0+25x20"),
            ("l2l_rank_wait_seconds_total{run=\"r\",rank=\"1\",waited_for=\"fabric\"}", "0+30x20"),
        ],
    },
    Alert {
        name: "L2lLossNotFinite",
        expression: "(l2l_loss != l2l_loss) or (abs(l2l_loss) == Inf) or \
            (increase(l2l_faults_total{kind=\"not_finite\"}[5m]) > 0)",
        after: "0s",
        severity: "critical",
        summary: "the loss or a gradient is not finite",
        means: "A step gave NaN or infinity. The run stops there, unless \
            `step.non_finite` or a loss scale lets it go on, and its error says whether \
            the model is whole. The last checkpoint is whole.",
        todo: &[
            "Start a new run from the last checkpoint (`model.path`) with a smaller \
            `optimizer.learning_rate`.",
            "Set `optimizer.clip_norm = 1.0` and `optimizer.warmup_steps`: they keep early \
            steps small.",
            "Check the data with `l2l data`.",
        ],
        fires: &[("l2l_loss{run=\"r\"}", "2 NaN NaN NaN NaN NaN NaN NaN NaN NaN NaN")],
        silent: &[
            ("l2l_loss{run=\"r\"}", "2-0.1x20"),
            ("l2l_faults_total{run=\"r\",kind=\"not_finite\"}", "0x20"),
        ],
    },
    Alert {
        name: "L2lMemoryAtCeiling",
        expression: "sum by (run, device) (l2l_device_memory_bytes) / on (run, device) \
            l2l_device_memory_budget_bytes > 0.98",
        after: "1m",
        severity: "info",
        summary: "device memory is used up to its ceiling",
        means: "The plan is at the ceiling. The run cannot exceed it, and takes no more memory \
            later; but there is none left for more slots.",
        todo: &[
            "`l2l plan CONFIG.toml` shows which part is the largest.",
            "Lower `step.micro_batch` or `channels` if something else needs the device.",
        ],
        fires: &[
            ("l2l_device_memory_bytes{run=\"r\",device=\"cpu0\",kind=\"weights\"}", "60x20"),
            ("l2l_device_memory_bytes{run=\"r\",device=\"cpu0\",kind=\"inputs\"}", "39x20"),
            ("l2l_device_memory_budget_bytes{run=\"r\",device=\"cpu0\"}", "100x20"),
        ],
        silent: &[
            ("l2l_device_memory_bytes{run=\"r\",device=\"cpu0\",kind=\"weights\"}", "60x20"),
            ("l2l_device_memory_budget_bytes{run=\"r\",device=\"cpu0\"}", "100x20"),
        ],
    },
    Alert {
        name: "L2lCheckpointOld",
        expression: "(time() - l2l_checkpoint_last_success_timestamp_seconds > 21600) and on (run) \
            (l2l_checkpoint_last_success_timestamp_seconds > 0) and on (run) (sum by (run) \
            (l2l_state{state=~\"training|validating|checkpointing\"}) == 1)",
        after: "5m",
        severity: "warning",
        summary: "the last checkpoint is more than six hours old",
        means: "A failure now would cost more than six hours of steps. If the run has no \
            checkpoint yet, the time counts from its start.",
        todo: &[
            "Lower `checkpoint.every_steps`.",
            "Ctrl-C finishes the step, writes a checkpoint and ends the run; `--resume` \
            continues it.",
        ],
        fires: &[
            ("l2l_checkpoint_last_success_timestamp_seconds{run=\"r\"}", "1x500"),
            ("l2l_state{run=\"r\",state=\"training\"}", "1x500"),
        ],
        silent: &[
            ("l2l_checkpoint_last_success_timestamp_seconds{run=\"r\"}", "0x500"),
            ("l2l_state{run=\"r\",state=\"training\"}", "1x500"),
        ],
    },
    Alert {
        name: "L2lCheckpointFailed",
        expression: "increase(l2l_checkpoint_failures_total[15m]) > 0",
        after: "0s",
        severity: "critical",
        summary: "a checkpoint could not be written",
        means: "The run ends with the error, or warns and trains on (`checkpoint.on_error`). \
            Earlier checkpoints are untouched.",
        todo: &[
            "The error says why: the disk is full, or the directory is no longer writable.",
            "When that is repaired, `--resume` continues from the last checkpoint.",
        ],
        fires: &[("l2l_checkpoint_failures_total{run=\"r\"}", "0 0 0 1x20")],
        silent: &[("l2l_checkpoint_failures_total{run=\"r\"}", "0x20")],
    },
    Alert {
        name: "L2lCheckpointDiskFull",
        expression: "l2l_checkpoint_disk_free_bytes < l2l_checkpoint_bytes",
        after: "0s",
        severity: "critical",
        summary: "the disk has no room for the next checkpoint",
        means: "When the last checkpoint was written, its disk had less space free than one more \
            takes. A checkpoint is written before the one that it replaces is removed.",
        todo: &[
            "Make room on the disk of `checkpoint.directory`.",
            "With a smaller `checkpoint.keep`, `--resume` needs less.",
        ],
        fires: &[
            ("l2l_checkpoint_disk_free_bytes{run=\"r\"}", "9 9 3x20"),
            ("l2l_checkpoint_bytes{run=\"r\"}", "4x20"),
        ],
        silent: &[
            ("l2l_checkpoint_disk_free_bytes{run=\"r\"}", "9x20"),
            ("l2l_checkpoint_bytes{run=\"r\"}", "4x20"),
        ],
    },
    Alert {
        name: "L2lVanished",
        expression: "(last_over_time(l2l_step[15m]) < \
                     last_over_time(l2l_steps_target[15m])) unless \
            on (run) l2l_step unless on (run) \
            (last_over_time(l2l_state{state=\"ended\"}[15m]) == 1)",
        after: "1m",
        severity: "critical",
        summary: "the run disappeared before its end",
        means: "The run was scraped within the last quarter of an hour, had neither done its steps \
            nor ended well, and no longer answers. It failed, or the system ended it (for instance \
            for lack of memory). However a run ends, it waits up to 15 s for one more scrape, so \
            its last samples show the kind of failure (`l2l_faults_total`); a run that the system \
            ended leaves no trace. Where Prometheus scrapes less often than every 15 s, a run that \
            ended well can look the same.",
        todo: &[
            "Read its output: it says what failed, and whether the model is whole.",
            "Read the system's log: it says whether memory ran out.",
            "`--resume` continues from the last checkpoint.",
        ],
        fires: &[
            ("l2l_step{run=\"r\"}", "1 2 3 4 5 stale"),
            ("l2l_steps_target{run=\"r\"}", "100x4 stale"),
            ("l2l_state{run=\"r\",state=\"ended\"}", "0x4 stale"),
        ],
        silent: &[
            // Stopped early, by hand or by validation.patience.
            ("l2l_step{run=\"r\"}", "1 2 3 4 5 stale"),
            ("l2l_steps_target{run=\"r\"}", "100x4 stale"),
            ("l2l_state{run=\"r\",state=\"ended\"}", "0x3 1 stale"),
            ("l2l_state{run=\"r\",state=\"failed\"}", "0x4 stale"),
            // Done.
            ("l2l_step{run=\"done\"}", "1 2 3 4 100 stale"),
            ("l2l_steps_target{run=\"done\"}", "100x4 stale"),
        ],
    },
    Alert {
        name: "L2lWatchdog",
        expression: "increase(l2l_faults_total{kind=\"hang\"}[15m]) > 0",
        after: "0s",
        severity: "critical",
        summary: "the watchdog ended a run in which nothing moved",
        means: "For `watchdog.seconds` no operation ended and no actor made progress. The error \
            names which actor waited for what.",
        todo: &[
            "The snapshot in the error shows which operation had begun and not ended.",
            "A machine that slept, or a process that was stopped, looks the same. If \
            operations are that slow, raise `watchdog.seconds`.",
            "Otherwise it is a bug: please report the snapshot.",
        ],
        fires: &[("l2l_faults_total{run=\"r\",kind=\"hang\"}", "0 0 0 1x20")],
        silent: &[
            ("l2l_faults_total{run=\"r\",kind=\"hang\"}", "0x20"),
            ("l2l_faults_total{run=\"r\",kind=\"error\"}", "0 0 0 1x20"),
        ],
    },
];
