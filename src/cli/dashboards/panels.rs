//! The panels of the Grafana dashboards: what each shows, by which queries. Plain data, so that a
//! panel can be added without knowing Grafana's JSON.

/// A panel: its kind, title, unit, description, queries with their legends, and width (of 24).
pub(super) struct Panel(
    pub(super) &'static str,
    pub(super) &'static str,
    pub(super) &'static str,
    pub(super) &'static str,
    pub(super) &'static [(&'static str, &'static str)],
    pub(super) u64,
);

/// A dashboard: its uid, title, and panels.
pub(super) struct Dashboard(
    pub(super) &'static str,
    pub(super) &'static str,
    pub(super) &'static [Panel],
);

pub(super) const DASHBOARDS: &[Dashboard] = &[
    Dashboard(
        "overview",
        "l2l: overview",
        &[
            Panel(
                "stat",
                "State",
                "none",
                "Present state of the run.",
                &[(r#"l2l_state{run="$run"} == 1"#, "{{state}}")],
                4,
            ),
            Panel(
                "stat",
                "Step",
                "none",
                "Training steps done.",
                &[(r#"l2l_step{run="$run"}"#, "done"), (r#"l2l_steps_target{run="$run"}"#, "of")],
                5,
            ),
            Panel(
                "stat",
                "Speed of light",
                "percentunit",
                "Model FLOP/s ÷ FLOP/s of a large matrix product on this machine.",
                &[(r#"l2l_speed_of_light_ratio{run="$run"}"#, "")],
                4,
            ),
            Panel(
                "stat",
                "Bottleneck",
                "percentunit",
                "What costs the run most time.",
                &[(r#"l2l:bottleneck:share{run="$run"}"#, "{{bottleneck}}")],
                4,
            ),
            Panel(
                "stat",
                "Since the last step",
                "s",
                "If this is much longer than a step, the run has stalled.",
                &[(r#"time() - l2l_last_step_timestamp_seconds{run="$run"}"#, "")],
                4,
            ),
            Panel(
                "stat",
                "Faults",
                "none",
                "Failures of any kind.",
                &[(r#"sum(l2l_faults_total{run="$run"})"#, "")],
                3,
            ),
            Panel(
                "timeseries",
                "Loss",
                "none",
                "Of training and of validation.",
                &[
                    (r#"l2l_loss{run="$run"}"#, "training"),
                    (r#"l2l_validation_loss{run="$run"}"#, "held out"),
                ],
                12,
            ),
            Panel(
                "timeseries",
                "Tokens a second",
                "none",
                "Without padding.",
                &[(r#"l2l_tokens_per_second{run="$run"}"#, "tokens/s")],
                12,
            ),
            Panel(
                "timeseries",
                "Step time",
                "s",
                "The last step, and the 90th percentile of the last hour.",
                &[
                    (r#"l2l_last_step_seconds{run="$run"}"#, "last"),
                    (
                        "histogram_quantile(0.9, sum by (le) \
                (rate(l2l_step_seconds_bucket{run=\"$run\"}[1h])))",
                        "90 %",
                    ),
                ],
                8,
            ),
            Panel(
                "timeseries",
                "Device memory",
                "bytes",
                "Highest use, and the ceiling.",
                &[
                    (r#"sum(l2l_device_memory_bytes{run="$run",device="$device"})"#, "used"),
                    (r#"l2l_device_memory_budget_bytes{run="$run",device="$device"}"#, "ceiling"),
                ],
                8,
            ),
            Panel(
                "timeseries",
                "Model FLOP/s",
                "none",
                "Without recomputation and padding.",
                &[(r#"rate(l2l_model_flops_total{run="$run"}[5m])"#, "FLOP/s")],
                8,
            ),
            Panel(
                "timeseries",
                "Gradient norm",
                "none",
                "Before clipping.",
                &[(r#"l2l_grad_norm{run="$run"}"#, "norm")],
                8,
            ),
            Panel(
                "timeseries",
                "Learning rate",
                "none",
                "Of the last step.",
                &[(r#"l2l_learning_rate{run="$run"}"#, "rate")],
                8,
            ),
            Panel(
                "timeseries",
                "Last checkpoint",
                "s",
                "Time since it. Before the first one: since the start of the run. Without \
            checkpoints: since 1970.",
                &[(r#"time() - l2l_checkpoint_last_success_timestamp_seconds{run="$run"}"#, "ago")],
                8,
            ),
        ],
    ),
    Dashboard(
        "overlap",
        "l2l: overlap",
        &[
            Panel(
                "heatmap",
                "Exposed wait by layer",
                "percentunit",
                "Share of time in which the compute lane was idle at a layer.",
                &[(
                    "sum by (layer) \
                (rate(l2l_exposed_wait_seconds_total{run=\"$run\"}[$__rate_interval]))",
                    "{{layer}}",
                )],
                24,
            ),
            Panel(
                "timeseries",
                "Overlap by layer",
                "percentunit",
                "1 − transfer-caused wait ÷ transfer.",
                &[(r#"l2l:layer_overlap:ratio{run="$run"}"#, "{{layer}}")],
                12,
            ),
            Panel(
                "timeseries",
                "Overlap",
                "percentunit",
                "Of all layers.",
                &[(r#"l2l:overlap:ratio{run="$run"}"#, "overlap")],
                12,
            ),
            Panel(
                "timeseries",
                "The compute lane's time",
                "percentunit",
                "Of the chosen device: computing, and waiting by cause. The sum is 1.",
                &[
                    (
                        "rate(l2l_device_lane_seconds_total{run=\"$run\",device=\"$device\",\
                         lane=\"compute\"}[$__rate_interval])",
                        "computed",
                    ),
                    (
                        "rate(l2l_device_wait_seconds_total{run=\"$run\",device=\"$device\"}\
                         [$__rate_interval])",
                        "{{waited_for}}",
                    ),
                    (
                        "rate(l2l_compute_wait_seconds_total{run=\"$run\",\
                         waited_for=~\"checkpoint|outside\"}[$__rate_interval])",
                        "{{waited_for}}",
                    ),
                ],
                12,
            ),
            Panel(
                "timeseries",
                "Devices",
                "percentunit",
                "Share of time that each device computed.",
                &[(
                    "rate(l2l_device_lane_seconds_total{run=\"$run\",lane=\"compute\"}\
                     [$__rate_interval])",
                    "{{device}}",
                )],
                12,
            ),
            Panel(
                "timeseries",
                "Lanes",
                "percentunit",
                "Share of time that each was busy.",
                &[(r#"rate(l2l_lane_seconds_total{run="$run"}[$__rate_interval])"#, "{{lane}}")],
                12,
            ),
            Panel(
                "timeseries",
                "Seconds a second, by layer and lane",
                "percentunit",
                "Where a layer's time goes.",
                &[(
                    "sum by (layer, lane) \
                (rate(l2l_visit_seconds_total{run=\"$run\"}[$__rate_interval]))",
                    "{{layer}} {{lane}}",
                )],
                12,
            ),
            Panel(
                "timeseries",
                "Link",
                "Bps",
                "Bytes a second, counted in the copies.",
                &[(
                    r#"rate(l2l_transfer_bytes_total{run="$run"}[$__rate_interval])"#,
                    "{{direction}}",
                )],
                12,
            ),
            Panel(
                "timeseries",
                "One operation",
                "s",
                "90th percentile.",
                &[(
                    "histogram_quantile(0.9, sum by (lane, le) \
                (rate(l2l_operation_seconds_bucket{run=\"$run\",\
                         lane=~\"upload|compute|download|host|update\"}[$__rate_interval])))",
                    "{{lane}}",
                )],
                24,
            ),
        ],
    ),
    Dashboard(
        "channels",
        "l2l: channels",
        &[
            Panel(
                "timeseries",
                "Slots in use",
                "none",
                "At the moment of the scrape.",
                &[(r#"l2l_channel_depth{run="$run"}"#, "{{channel}}")],
                12,
            ),
            Panel(
                "timeseries",
                "Fill",
                "percentunit",
                "Always full: the actor after the channel is slow. Always empty: the actor \
            before it.",
                &[(
                    r#"l2l_channel_depth{run="$run"} / l2l_channel_capacity{run="$run"}"#,
                    "{{channel}}",
                )],
                12,
            ),
            Panel(
                "timeseries",
                "Starved",
                "percentunit",
                "Share of time an actor waited for actors before it.",
                &[(
                    "rate(l2l_actor_seconds_total{run=\"$run\",state=\"starved\"}\
                         [$__rate_interval])",
                    "{{actor}}",
                )],
                12,
            ),
            Panel(
                "timeseries",
                "Blocked",
                "percentunit",
                "Share of time an actor waited for actors after it: more slots there may help.",
                &[(
                    "rate(l2l_actor_seconds_total{run=\"$run\",state=\"blocked\"}\
                         [$__rate_interval])",
                    "{{actor}}",
                )],
                12,
            ),
            Panel(
                "timeseries",
                "Busy",
                "percentunit",
                "Share of time. Actors decide and do not compute, so it should be near 0.",
                &[(
                    r#"rate(l2l_actor_seconds_total{run="$run",state="busy"}[$__rate_interval])"#,
                    "{{actor}}",
                )],
                12,
            ),
            Panel(
                "bargauge",
                "What to tune",
                "percentunit",
                "upload: channels.weights, channels.stash. download: channels.gradients, \
            stash.place. update: channels.reduced, a larger step.batch. compute: nothing. \
            `l2l tune` tries settings.",
                &[(r#"l2l:wait:share{run="$run"}"#, "{{bottleneck}}")],
                12,
            ),
            Panel(
                "stat",
                "Slots",
                "none",
                "Number of slots of each channel.",
                &[(r#"l2l_channel_capacity{run="$run"}"#, "{{channel}}")],
                24,
            ),
        ],
    ),
    Dashboard(
        "eps",
        "l2l: eager param-server",
        &[
            Panel(
                "timeseries",
                "Updates a second",
                "none",
                "Of blocks.",
                &[(
                    r#"sum(rate(l2l_block_updates_total{run="$run"}[$__rate_interval]))"#,
                    "updates",
                )],
                12,
            ),
            Panel(
                "timeseries",
                "Updates by layer",
                "none",
                "All trained layers should have the same number.",
                &[(r#"l2l_block_updates_total{run="$run"}"#, "{{layer}}")],
                12,
            ),
            Panel(
                "timeseries",
                "Host memory",
                "bytes",
                "By holder, as planned.",
                &[(r#"l2l_host_memory_bytes{run="$run"}"#, "{{kind}}")],
                12,
            ),
            Panel(
                "timeseries",
                "Process",
                "bytes",
                "As the system reports it.",
                &[(r#"process_resident_memory_bytes{run="$run"}"#, "resident")],
                12,
            ),
            Panel(
                "timeseries",
                "Host, update and file lanes",
                "percentunit",
                "Share of time that each was busy.",
                &[(
                    "rate(l2l_lane_seconds_total{run=\"$run\",lane=~\"host|update|file\"}\
                         [$__rate_interval])",
                    "{{lane}}",
                )],
                12,
            ),
            Panel(
                "timeseries",
                "Cores",
                "none",
                "In use by the process.",
                &[(r#"rate(process_cpu_seconds_total{run="$run"}[$__rate_interval])"#, "cores")],
                12,
            ),
            Panel(
                "stat",
                "Checkpoints that failed",
                "none",
                "Should be 0.",
                &[(r#"l2l_checkpoint_failures_total{run="$run"}"#, "")],
                6,
            ),
            Panel(
                "stat",
                "Threads",
                "none",
                "Of the process.",
                &[(r#"process_threads{run="$run"}"#, "")],
                6,
            ),
            Panel(
                "stat",
                "Open files",
                "none",
                "Open, and the limit.",
                &[
                    (r#"process_open_fds{run="$run"}"#, "open"),
                    (r#"process_max_fds{run="$run"}"#, "at most"),
                ],
                12,
            ),
        ],
    ),
    super::ranks::RANKS,
];
