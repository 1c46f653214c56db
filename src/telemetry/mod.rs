//! Telemetry: the lanes measure each operation, a ledger sums once, and many views show the sums.
//!
//! ```text
//!  lanes ──▶ Slice ──▶ Ledger ──▶ Tally ─┐
//!              │                         ├──▶ RunView ──▶ metrics · live page · report
//!              └──▶ Observers   RunStatus ───┘
//!                   (trace, histograms)
//! ```
//!
//! Each operation becomes a [`Slice`] as it ends, and the ledger adds it up. A program takes a
//! [`RunView`] of the run through its [`Watch`]. Reading telemetry never delays a lane.

mod chunk_costs;
mod critical;
#[cfg(feature = "prometheus")]
mod door;
#[cfg(feature = "prometheus")]
mod exporter;
#[cfg(not(feature = "prometheus"))]
#[path = "no_exporter.rs"]
mod exporter;
#[doc(hidden)]
pub mod files; // for the command line
mod fitted;
mod fixed;
mod forecast;
mod gantt;
mod hiding;
mod labels;
mod ledger;
mod list;
mod log;
mod machine;
#[cfg(test)]
mod of_ranks;
mod page;
mod perfetto;
#[cfg(feature = "metrics")]
mod publish;
mod ranks;
mod rate_runs;
mod routers;
#[cfg(feature = "prometheus")]
mod server;
mod slice;
mod speeds;
mod status;
mod step_report;
mod tally;
mod tensorboard;
mod trace;
mod watch;

pub(crate) use exporter::Exporter;
pub use fitted::{FittedLine, FittedRates};
pub use forecast::{Forecast, Rates, Wait};
pub use gantt::draw;
pub use hiding::Hiding;
pub use l2l_actors::work::{Lane, WorkKind};
pub use labels::{LabelValues, label_values};
pub use ledger::Ledger;
pub use list::{METRICS, Metric, MetricKind, Unit, samples};
pub use log::EventLog;
pub use machine::{MACHINES, Machine};
pub use page::{Report, live};
pub use perfetto::timeline;
#[cfg(feature = "metrics")]
pub use publish::{Histograms, describe, publish};
pub use ranks::RankView;
pub use rate_runs::RateRuns;
pub use routers::RouterView;
#[cfg(feature = "prometheus")]
pub use server::{Server, recorder};
pub use slice::{Observe, Slice, SliceKind};
pub use status::{Point, State, made_up_name};
pub(crate) use status::{RunStatus, seconds_of, unix_seconds};
pub(crate) use step_report::{StepEnd, StepReports};
pub use tally::{DeviceTally, LaneTally, LayerTally, Tally, WaitCause};
pub use trace::Trace;
pub(crate) use watch::Watched;
pub use watch::{
    ActorView, ChannelView, DeviceView, LaneView, LayerView, MemoryView, RunView, Watch,
};
