//! Machines that are not at hand, as files describe them: what a run would take there.

use std::num::NonZeroU32;

use l2l_actors::schedule::DeviceId;
use l2l_actors::virtual_time::Use;
use l2l_actors::work::WorkKind;
use serde::Deserialize;

use super::fitted::waits_for_threads;
use super::forecast::Rates;
use super::speeds::Speeds;
use crate::config::{ByteSize, Config, DeviceKind, Dtype, bytes_per_second, flops_per_second};
use crate::error::Error;
use crate::models::Model;
use crate::plan::{Plan, RankShare};

/// A machine, or several that train together.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// What it is called.
    pub name: String,
    /// The price of an hour of all hosts, in any currency.
    pub price_per_hour: Option<Positive>,
    /// Where its rates come from.
    #[serde(default)]
    pub rates: RateSource,
    /// A host.
    pub host: MachineHost,
    /// The GPUs of a host, which are alike.
    pub device: MachineDevices,
    /// The disk of a host.
    pub disk: Option<MachineDisk>,
    /// The hosts, if there are several, and the network between them.
    pub fabric: Option<MachineFabric>,
}

/// Where the rates of a machine come from.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum RateSource {
    /// Data sheets, and machines that are alike.
    #[default]
    Assumed,
    /// Runs on it.
    Measured,
}

impl RateSource {
    /// The word of a description.
    pub fn name(self) -> &'static str {
        match self {
            RateSource::Assumed => "assumed",
            RateSource::Measured => "measured",
        }
    }
}

/// `[host]`
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct MachineHost {
    /// Bytes that a run may use.
    pub memory: Bytes,
    /// Bytes a second that the memory moves: copies to devices, updates and sums share it.
    pub stream: ByteRate,
}

/// `[device]`
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct MachineDevices {
    /// GPUs of a host.
    pub count: NonZeroU32,
    /// Bytes of each that a run may use.
    pub memory: Bytes,
    /// Bytes a second of its memory.
    pub stream: ByteRate,
    /// FLOP/s of products of large matrices, by data type.
    pub products: ProductRates,
    /// Bytes a second between host and device, each way.
    pub link: ByteRate,
    /// Seconds that a kernel takes whatever its size: its start and its end.
    pub launch_seconds: Option<Positive>,
    /// Links that share a root.
    pub root: Option<MachineRoot>,
}

/// `[device.root]`
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct MachineRoot {
    /// Devices of one root.
    pub devices: NonZeroU32,
    /// Bytes a second of a root, each way.
    pub rate: ByteRate,
}

/// `device.products`
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct ProductRates {
    /// Of f32, or of what stands for it.
    pub f32: Option<FlopRate>,
    /// Of f16, with sums in f32.
    pub f16: Option<FlopRate>,
    /// Of bf16, with sums in f32.
    pub bf16: Option<FlopRate>,
}

/// `[disk]`
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct MachineDisk {
    /// Bytes that a run may use.
    pub size: Bytes,
    /// Bytes a second, read or written.
    pub rate: ByteRate,
}

/// `[fabric]`
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct MachineFabric {
    /// Hosts, each with a process.
    pub hosts: NonZeroU32,
    /// Bytes a second that a host receives.
    pub rate: ByteRate,
    /// Seconds that a message takes whatever its size. In an exchange a host has one from each
    /// other.
    pub message_seconds: Option<Positive>,
}

/// Bytes, as `"80GB"`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(try_from = "String")]
pub struct Bytes(pub u64);

/// Bytes a second, as `"55GB/s"`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(try_from = "String")]
pub struct ByteRate(pub f64);

/// FLOP/s, as `"400TFLOP/s"`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(try_from = "String")]
pub struct FlopRate(pub f64);

/// A number above 0.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(try_from = "f64")]
pub struct Positive(pub f64);

impl TryFrom<String> for Bytes {
    type Error = String;

    fn try_from(text: String) -> Result<Bytes, String> {
        let bytes = text.parse::<ByteSize>()?.bytes().filter(|&bytes| bytes > 0);
        bytes.map(Bytes).ok_or_else(|| format!("{text:?} is no size: write one as \"80GB\""))
    }
}

impl TryFrom<String> for ByteRate {
    type Error = String;

    fn try_from(text: String) -> Result<ByteRate, String> {
        let wrong = || format!("{text:?} is no rate: write one as \"55GB/s\"");
        bytes_per_second(&text).map(ByteRate).ok_or_else(wrong)
    }
}

impl TryFrom<String> for FlopRate {
    type Error = String;

    fn try_from(text: String) -> Result<FlopRate, String> {
        let wrong = || format!("{text:?} is no rate: write one as \"400TFLOP/s\"");
        flops_per_second(&text).map(FlopRate).ok_or_else(wrong)
    }
}

impl TryFrom<f64> for Positive {
    type Error = String;

    fn try_from(number: f64) -> Result<Positive, String> {
        let is_one = number.is_finite() && number > 0.0;
        is_one.then_some(Positive(number)).ok_or_else(|| format!("{number} is not above 0"))
    }
}

/// Machines that come with the program, by name.
pub const MACHINES: [(&str, &str); 8] = [
    ("h100", include_str!("../../machines/h100.toml")),
    ("8xh100", include_str!("../../machines/8xh100.toml")),
    ("64x8xh100", include_str!("../../machines/64x8xh100.toml")),
    ("1000xh100", include_str!("../../machines/1000xh100.toml")),
    ("gh200", include_str!("../../machines/gh200.toml")),
    ("2x4090", include_str!("../../machines/2x4090.toml")),
    ("8x4090", include_str!("../../machines/8x4090.toml")),
    ("v100-512gb", include_str!("../../machines/v100-512gb.toml")),
];

impl Machine {
    /// Reads a description.
    ///
    /// # Errors
    /// A key is missing or unknown, or its value is none of its kind. The text names the line.
    pub fn parse(text: &str) -> Result<Machine, String> {
        toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())
    }

    /// The hosts.
    pub fn hosts(&self) -> u32 {
        self.fabric.as_ref().map_or(1, |fabric| fabric.hosts.get())
    }

    /// The process that a plan is made for: the first of those that compute most of a step.
    ///
    /// # Errors
    /// The config has fewer groups than there are hosts.
    pub fn share(&self, config: &Config, model: &Model) -> Result<RankShare, Error> {
        let all = RankShare { rank: 0, ranks: self.hosts() };
        all.busiest(config, model.sequences_of(config.step.batch))
    }

    /// The config of a run on this machine. `device.memory` stays where it is less than the
    /// machine has.
    pub fn config(&self, config: &Config) -> Config {
        let mut config = config.clone();
        let device = &mut config.device;
        let own = device.memory.bytes().unwrap_or(u64::MAX);
        device.kind = DeviceKind::Cuda;
        device.memory = ByteSize::from(own.min(self.device.memory.0));
        device.ordinals = Some((0..self.device.count.get() as usize).collect());
        (device.ordinal, device.count) = (0, None);
        (device.link, device.flop_rate) = (None, None);
        (config.eps.update_rate, config.eps.disk_rate) = (None, None);
        config.parallel.fabric_rate = None;
        config
    }

    /// The rates of a run of this config.
    ///
    /// # Errors
    /// The device has no products of the config's data type.
    pub fn rates_of(&self, config: &Config, model: &Model) -> Result<Rates, Error> {
        let ProductRates { f32, f16, bf16 } = &self.device.products;
        let dtype = config.device.dtype;
        let products = match dtype {
            Dtype::F32 => f32,
            Dtype::F16 => f16,
            Dtype::Bf16 => bf16,
        };
        let Some(FlopRate(flops)) = *products else {
            let problem = "has no such key: give it, or set device.dtype to one that it has";
            return Err(Error::Argument(format!(
                "{}: device.products.{dtype} {problem}",
                self.name
            )));
        };
        let speeds = Speeds {
            flops,
            stream: self.device.stream.0,
            passes: PASSES,
            launch: self.device.launch_seconds.map_or(0.0, |Positive(seconds)| seconds),
            link: self.device.link.0,
            host: self.host.stream.0,
        };
        let mut rates = Rates::of_speeds(config, model, &speeds).with_sharing(Sharing::Memory {
            host: self.host.stream.0,
            root: self.device.root.as_ref().map(|root| (root.devices.get(), root.rate.0)),
        });
        if let Some(disk) = &self.disk {
            rates = rates.with_disk(disk.rate.0);
        }
        if let Some(fabric) = &self.fabric {
            rates = rates.with_fabric(fabric.rate.0);
            let message = fabric.message_seconds.map_or(0.0, |Positive(seconds)| seconds);
            let others = f64::from(self.hosts() - 1);
            for kind in [WorkKind::Fetch, WorkKind::Exchange, WorkKind::Sum] {
                rates.fixed.work.insert(kind, message * others);
            }
        }
        Ok(rates)
    }

    /// What a plan needs and the machine does not have.
    pub fn misfit(&self, plan: &Plan) -> Option<String> {
        let gigabytes = |bytes: u64| bytes as f64 / 1e9;
        let lacks = |what: &str, needs: u64, has: u64| {
            let [needs, has] = [needs, has].map(gigabytes);
            format!("{what} {needs:.1} GB of {has:.1} GB")
        };
        let device = plan.budget().unwrap_or(self.device.memory.0);
        let disk = self.disk.as_ref().map_or(0, |disk| disk.size.0);
        let file: u64 = plan.file_bytes();
        if plan.device_bytes() > device {
            Some(lacks("a device needs", plan.device_bytes(), device))
        } else if plan.host_bytes() > self.host.memory.0 {
            Some(lacks("the host needs", plan.host_bytes(), self.host.memory.0))
        } else {
            (file > disk).then(|| lacks("the disk needs", file, disk))
        }
    }
}

/// [`Speeds::passes`] of a GPU. On one H100 products took 76 % of the kernels' time in two layers
/// of Llama-3-8B (benches/GPU.md). With products at 790 TFLOP/s the other 24 %, less the FLOPs of
/// attention at the same rate, move as many bytes at 3,350 GB/s.
const PASSES: f64 = 31.0;

/// What operations on several lanes share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Sharing {
    /// The host's memory, and roots of devices.
    Memory {
        /// Bytes a second of the host's memory.
        host: f64,
        /// Devices of a root, and its bytes a second each way.
        root: Option<(u32, f64)>,
    },
    /// The host's threads: all of them compute an update or a sum, and each of these devices of the
    /// CPU has a part of them.
    Threads { devices: u32 },
}

/// The resource of the host's threads.
const THREADS: u32 = 0;

/// The resource of the host's memory; those of roots follow, two for each.
const HOST_MEMORY: u32 = 0;

impl Sharing {
    /// The resources that an operation of this kind uses. Alone it moves `rate` bytes a second.
    pub(super) fn uses(&self, kind: WorkKind, device: Option<DeviceId>, rate: f64) -> Vec<Use> {
        match *self {
            Sharing::Memory { host, root } => memory_uses(host, root, kind, device, rate),
            Sharing::Threads { devices } => {
                let is_kernel =
                    matches!(kind, WorkKind::Forward | WorkKind::Keys | WorkKind::Backward);
                let of_all = waits_for_threads(kind).then_some(1.0);
                let share = of_all.or(is_kernel.then_some(1.0 / f64::from(devices)));
                share.map(|share| Use { resource: THREADS, share }).into_iter().collect()
            }
        }
    }
}

/// [`Sharing::uses`] of memory and roots.
fn memory_uses(
    host: f64,
    root: Option<(u32, f64)>,
    kind: WorkKind,
    device: Option<DeviceId>,
    rate: f64,
) -> Vec<Use> {
    let up = matches!(kind, WorkKind::Weights | WorkKind::Input);
    let down = matches!(kind, WorkKind::Gradient | WorkKind::Output);
    let streams = matches!(kind, WorkKind::Update | WorkKind::Reduce | WorkKind::Scatter);
    let moves =
        matches!(kind, WorkKind::Read | WorkKind::Write | WorkKind::Fetch | WorkKind::Exchange);
    let memory = match () {
        () if streams => 1.0,
        () if up || down || moves => (rate / host).min(1.0),
        () => return Vec::new(),
    };
    let mut uses = vec![Use { resource: HOST_MEMORY, share: memory }];
    if let (Some((devices, of_root)), Some(device)) = (root, device)
        && (up || down)
    {
        let root = u32::from(device) / devices;
        let resource = HOST_MEMORY + 1 + 2 * root + u32::from(down);
        uses.push(Use { resource, share: (rate / of_root).min(1.0) });
    }
    uses
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = r#"
        name = "a machine"
        [host]
        memory = "64GB"
        stream = "100GB/s"
        [device]
        count = 4
        memory = "16GB"
        stream = "1TB/s"
        products = { f16 = "100TFLOP/s" }
        link = "25GB/s"
    "#;

    #[test]
    fn every_machine_that_comes_with_the_program_is_read() {
        for (name, text) in MACHINES {
            assert!(Machine::parse(text).is_ok_and(|one| !one.name.is_empty()), "{name}");
        }
    }

    #[test]
    fn a_description_that_is_wrong_is_refused_by_its_line() {
        let machine = Machine::parse(PLAIN).expect("it is plain");
        assert_eq!((machine.hosts(), machine.host.memory.0), (1, 64_000_000_000));
        for (from, to, says) in [
            ("64GB", "auto", "\"auto\" is no size: write one as \"80GB\""),
            ("64GB", "-1GB", "\"-1GB\" is not a size"),
            ("25GB/s", "25", "\"25\" is no rate: write one as \"55GB/s\""),
            ("25GB/s", "0GB/s", "\"0GB/s\" is no rate"),
            ("25GB/s", "NaNGB/s", "\"NaNGB/s\" is no rate"),
            ("100TFLOP/s", "100TB/s", "write one as \"400TFLOP/s\""),
            ("count = 4", "count = 0", "nonzero"),
            ("count = 4", "", "missing field `count`"),
            ("count = 4", "count = 4\ncores = 8", "unknown field `cores`"),
            ("name =", "price_per_hour = -3.0\nname =", "-3 is not above 0"),
        ] {
            let problem = Machine::parse(&PLAIN.replace(from, to)).expect_err(to);
            assert!(problem.contains(says) && problem.contains("line "), "{to}: {problem}");
        }
    }

    #[test]
    fn lanes_share_a_root_the_hosts_memory_and_its_threads() {
        let memory = Sharing::Memory { host: 100.0, root: Some((2, 40.0)) };
        let shares_of = |sharing: Sharing, kind, device| {
            let uses = sharing.uses(kind, device, 25.0).into_iter();
            uses.map(|used| (used.resource, used.share)).collect::<Vec<_>>()
        };
        let threads = |kind| shares_of(Sharing::Threads { devices: 2 }, kind, None);
        assert_eq!(threads(WorkKind::Update), [(THREADS, 1.0)]);
        assert_eq!(threads(WorkKind::Backward), [(THREADS, 0.5)]);
        assert_eq!(threads(WorkKind::Weights), []);
        let shares = |kind, device| shares_of(memory, kind, device);
        let memory = (HOST_MEMORY, 0.25);
        assert_eq!(shares(WorkKind::Weights, Some(1)), [memory, (1, 0.625)]);
        assert_eq!(shares(WorkKind::Output, Some(1)), [memory, (2, 0.625)]);
        assert_eq!(shares(WorkKind::Input, Some(2)), [memory, (3, 0.625)]);
        assert_eq!(shares(WorkKind::Write, None), [memory]);
        assert_eq!(shares(WorkKind::Update, None), [(HOST_MEMORY, 1.0)]);
        assert_eq!(shares(WorkKind::Forward, Some(0)), []);
    }
}
