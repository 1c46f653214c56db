//! Recording rules: what dashboards and alerts read.

/// Recording rules, in order: their names and expressions.
pub(super) const RECORDED: &[(&str, &str)] = &[
    (
        "l2l:layer_overlap:ratio",
        "clamp_min(1 - sum by (run, layer) \
            (rate(l2l_exposed_wait_seconds_total{cause=\"transfer\"}[5m])) / sum by (run, \
            layer) (rate(l2l_transfer_seconds_total[5m])), 0)",
    ),
    (
        "l2l:overlap:ratio",
        "clamp_min(1 - sum by (run) \
            (rate(l2l_exposed_wait_seconds_total{cause=\"transfer\"}[5m])) / sum by (run) \
            (rate(l2l_transfer_seconds_total[5m])), 0)",
    ),
    (
        "l2l:compute_lane:rate",
        // Waits are a mean over the devices; so is the time of their kernels here.
        // Of runs that are still there: what a run waited for is no news once it has ended.
        "(sum by (run) (rate(l2l_compute_wait_seconds_total[5m])) + avg by (run) \
            (rate(l2l_device_lane_seconds_total{lane=\"compute\"}[5m]))) and on (run) l2l_step",
    ),
    (
        "l2l:exposed_wait:ratio",
        "sum by (run) \
            (rate(l2l_compute_wait_seconds_total{waited_for!~\"outside|checkpoint\"}[5m])) / on \
            (run) l2l:compute_lane:rate",
    ),
    (
        "l2l:wait:share",
        "sum by (run, bottleneck) (label_replace(rate(l2l_compute_wait_seconds_total{\
         waited_for!~\"outside|checkpoint|file|host|ring\"}[5m]), \"bottleneck\", \"$1\", \
            \"waited_for\", \"(.*)\") or label_replace(rate(\
         l2l_compute_wait_seconds_total{waited_for=~\"host|ring\"}[5m]), \
            \"bottleneck\", \"host\", \"\", \"\") or label_replace(rate(\
         l2l_compute_wait_seconds_total{waited_for=~\"checkpoint|file\"}[5m]), \
            \"bottleneck\", \"disk\", \"\", \"\")) / on (run) group_left () l2l:compute_lane:rate",
    ),
    (
        "l2l:bottleneck:share",
        "topk by (run) (1, l2l:wait:share > 0.1) or on (run) label_replace(avg by (run) \
            (rate(l2l_device_lane_seconds_total{lane=\"compute\"}[5m])) / on (run) \
            l2l:compute_lane:rate, \"bottleneck\", \"compute\", \"\", \"\")",
    ),
];
