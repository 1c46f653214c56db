//! Hosts that are cut off at random moments. Network namespaces play the hosts, and `mpirun`
//! reaches them over TCP.
//!
//! The ranks on both sides of a cut end by themselves and name those they lost. `mpirun` then
//! waits for the host that it lost, because its order to end the ranks there stays in TCP's queue;
//! the test ends it. With keepalives that fail before the ranks' watchdogs do, `mpirun` ends all by
//! itself, and names the host.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, id};
use std::time::Duration;

use crate::failures::{NEVER_BEGAN, slow};
use crate::runs::{Chance, Moment, PROGRAM, Phase, Run, Tally, resumes, settings};

/// The part of all addresses, and the subnet.
const NETWORK: &str = "10.77.0";
const SUBNET: &str = "10.77.0.0/24";

/// `mpirun` takes a host for lost after 2 + 3 × 1 seconds without an answer.
const KEEPALIVES: [&str; 9] = [
    "--mca",
    "oob_tcp_keepalive_time",
    "2",
    "--mca",
    "oob_tcp_keepalive_intvl",
    "1",
    "--mca",
    "oob_tcp_keepalive_probes",
    "3",
];

/// Longer than that, for the ranks.
const LATER: &str = "watchdog.seconds=10";

/// Namespaces as hosts, each with a link to a bridge. They are removed at the end, with all
/// processes in them.
struct Hosts {
    count: u32,
    /// Starts a command on a host, as `ssh` would.
    agent: PathBuf,
    folder: PathBuf,
}

/// Runs `ip`. The error is what it says.
fn ip(arguments: &str) -> Result<String, String> {
    let output = Command::new("ip").args(arguments.split_whitespace()).output();
    let output = output.map_err(|error| format!("ip of iproute2: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_string();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(format!("ip {arguments}: {}", text(&output.stderr))),
    }
}

/// The namespace of a host, or `net` of the bridge.
fn namespace(of: impl std::fmt::Display) -> String {
    format!("l2l-{}-{of}", id())
}

impl Hosts {
    /// Makes a number of hosts. The error says why that cannot be done here.
    fn new(count: u32, folder: &Path) -> Result<Hosts, String> {
        let agent = folder.join("agent");
        let hosts = Hosts { count, agent, folder: folder.to_path_buf() };
        let net = namespace("net");
        ip(&format!("netns add {net}"))?;
        ip(&format!("-n {net} link add bridge type bridge"))?;
        ip(&format!("-n {net} link set bridge up"))?;
        for host in 1..=count {
            let own = namespace(host);
            let port = format!("port{host}");
            let address = format!("{NETWORK}.{host}/24");
            ip(&format!("netns add {own}"))?;
            ip(&format!("-n {net} link add {port} type veth peer name eth0 netns {own}"))?;
            ip(&format!("-n {net} link set {port} master bridge up"))?;
            ip(&format!("-n {own} addr add {address} dev eth0"))?;
            ip(&format!("-n {own} link set eth0 up"))?;
            ip(&format!("-n {own} link set lo up"))?;
            ip(&format!("netns exec {own} unshare --uts hostname {own}"))?;
        }
        let script = format!(
            "#!/bin/sh\nhost={}${{1##*.}}; shift\n\
             exec ip netns exec $host unshare --uts sh -c \"hostname $host; $*\"\n",
            namespace("")
        );
        let write = fs::write(&hosts.agent, script)
            .and_then(|()| fs::set_permissions(&hosts.agent, fs::Permissions::from_mode(0o755)));
        write.map_err(|error| error.to_string())?;
        Ok(hosts)
    }

    /// `l2l train` with a rank on each host; each writes its stderr to a file of its own.
    fn train(&self, directory: &Path, more: &[&str], keepalives: &[&str]) -> Command {
        let first = namespace(1);
        let agent = self.agent.display().to_string();
        let addresses: Vec<String> =
            (1..=self.count).map(|host| format!("{NETWORK}.{host}")).collect();
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &first, "unshare", "--uts"])
            .args(["sh", "-c", "hostname \"$0\"; exec \"$@\"", &first])
            .args(["mpirun", "--allow-run-as-root", "-n", &self.count.to_string()])
            .args(["--host", &addresses.join(",")])
            .args(["--mca", "plm_rsh_agent", &agent])
            .args(["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", SUBNET])
            .args(["--mca", "oob_tcp_if_include", SUBNET])
            .args(["--mca", "orte_tmpdir_base", &self.folder.display().to_string()])
            .args(keepalives)
            .args(["sh", "-c", "exec \"$@\" 2> \"$0.$OMPI_COMM_WORLD_RANK\""])
            .arg(directory)
            .arg(PROGRAM)
            .args(settings(directory, more));
        command
    }

    /// Cuts off the host of a rank.
    fn cut(&self, rank: u32) {
        let port = rank + 1;
        let cut = ip(&format!("-n {} link set port{port} down", namespace("net")));
        cut.expect("the link is there");
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in (1..=self.count).map(namespace).chain([namespace("net")]) {
            for process in ip(&format!("netns pids {host}")).unwrap_or_default().lines() {
                _ = Command::new("kill").args(["-KILL", process]).status();
            }
            _ = ip(&format!("netns del {host}"));
        }
    }
}

/// The ranks that an error names as lost; none if it says something else.
fn lost(said: &str) -> Vec<u32> {
    let Some((_, from)) = said.split_once("nothing comes from rank") else { return Vec::new() };
    let named = from.split(" in ").next().unwrap_or_default().trim_start_matches('s');
    named.split(',').filter_map(|rank| rank.trim().parse().ok()).collect()
}

/// Cuts the link of a rank's host a number of times, every other time with keepalives.
pub(crate) fn cuts_end_in_bounds(count: u32, folder: &Path, expected: &str, chance: &mut Chance) {
    let mut tally = Tally::default();
    for case in 0..count {
        let hosts = match Hosts::new(2 + chance.below(2) as u32, folder) {
            Ok(hosts) => hosts,
            Err(why) => {
                println!("links that are cut: left out, hosts cannot be made here: {why}");
                return;
            }
        };
        let end = cut_once(&hosts, case, folder, expected, chance);
        tally.0.push(end);
    }
    println!("links that are cut: {tally}");
}

fn cut_once(
    hosts: &Hosts,
    case: u32,
    folder: &Path,
    expected: &str,
    chance: &mut Chance,
) -> (Phase, Duration) {
    let directory = folder.join(format!("cut-{case}"));
    let moment = Moment::of(case);
    let is_kept_alive = !case.is_multiple_of(2);
    let seconds = if is_kept_alive { LATER } else { "watchdog.seconds=3" };
    let keepalives = if is_kept_alive { &KEEPALIVES[..] } else { &[] };
    let command = hosts.train(&directory, &slow(seconds, moment), keepalives);
    let mut run = Run::start(command, hosts.count, &directory);
    run.wait_for(moment, chance);
    let victim = chance.below(u64::from(hosts.count)) as u32;
    let phase = run.disturb(|| hosts.cut(victim));
    let took = run.wait_for_ranks();
    let said = |rank: u32| {
        let said = fs::read_to_string(format!("{}.{rank}", directory.display()));
        said.unwrap_or_default()
    };
    let fails = |text: &str| text.contains("error:");
    let others = (0..hosts.count).filter(|&rank| rank != victim);
    if is_kept_alive && phase != Phase::Starting {
        let is_well = run.wait_for_launcher();
        let names = run.error().contains("lost communication with a remote daemon");
        assert!(
            phase == Phase::Ended || (is_well != Some(true) && names),
            "rank {victim}: {}",
            run.error()
        );
    } else if !is_kept_alive && phase != Phase::Ended {
        let all: Vec<(u32, String)> = (0..hosts.count).map(|rank| (rank, said(rank))).collect();
        assert!(fails(&said(victim)) && others.clone().any(|rank| fails(&said(rank))), "{all:?}");
        for (rank, text) in all.iter().filter(|(_, text)| fails(text)) {
            let of = |lost: &u32| (*lost == victim) != (*rank == victim);
            let never_began = phase == Phase::Starting && text.contains(NEVER_BEGAN);
            assert!(never_began || lost(text).iter().any(of), "{victim} was cut off: {all:?}");
        }
    }
    // A rank that its launcher ended may have said nothing. Without keepalives the launcher waits
    // for the lost host.
    let silent = (0..hosts.count).filter(|&rank| !fails(&said(rank))).count();
    let stays = if run.has_launcher_ended() { "mpirun ended" } else { "mpirun stayed" };
    drop(run);
    let again = chance.below(4) as u32;
    resumes(again, &directory, expected);
    println!(
        "cut off rank {victim} of {}, {phase:?}{}: all ended in {:.1} s, {silent} silent, \
         {stays}, resumed on {again}",
        hosts.count,
        if is_kept_alive { " with keepalives" } else { "" },
        took.as_secs_f64(),
    );
    (phase, took)
}
