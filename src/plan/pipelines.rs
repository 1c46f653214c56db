//! Pipelines as a config names them: by kind, or in a file.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use l2l_actors::schedule::{
    MicroBatch, Pipeline, Refusal, RingModel, Schedule, Selection, pipedream, pipedream_2bw,
    pipeline,
};

use crate::config::{Config, ScheduleKind};
use crate::error::Error;

/// The largest file that is read as a pipeline. A table of stages is far smaller.
const LARGEST: u64 = 64 << 20;

/// The pipeline of the config's file, if it names one.
///
/// # Errors
/// The file cannot be read, is no table of a pipeline, or has another number of devices.
pub(super) fn read(config: &Config) -> Result<Option<Pipeline>, Error> {
    let Some(path) = config.schedule.path.as_ref() else { return Ok(None) };
    let refused = |problem: String| {
        Error::config("schedule.path", format_args!("{}: {problem}", path.display()))
    };
    let text = read_text(path).map_err(refused)?;
    let pipeline = Pipeline::parse(&text).map_err(|refusal| refused(refusal.reason))?;
    let rows = pipeline.devices.len();
    let devices = config.devices();
    if rows != devices as usize {
        return Err(refused(format!(
            "has {rows} rows, one for each device, and there are {devices} devices"
        )));
    }
    Ok(Some(pipeline))
}

fn read_text(path: &Path) -> Result<String, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let mut text = String::new();
    let read = file.take(LARGEST + 1).read_to_string(&mut text);
    match read.map_err(|error| error.to_string())? as u64 {
        bytes if bytes > LARGEST => Err("is too large for a pipeline".into()),
        _ => Ok(text),
    }
}

/// The schedule of the config's pipeline, which is `file` if the config names one. A step that does
/// not train has no backward passes, and may have another number of micro-batches than the file.
pub(super) fn schedule_of(
    config: &Config,
    ring: &RingModel,
    selection: &Selection,
    file: Option<&Pipeline>,
    trains: bool,
) -> Result<Schedule, Error> {
    let key = if file.is_some() { "schedule.path" } else { "schedule.kind" };
    let refused =
        |refusal: Refusal| Error::config(key, format_args!("cannot run: {}", refusal.reason));
    let count = selection.micro_batches.len() as MicroBatch;
    let devices = config.devices();
    let chunks = config.schedule.chunks();
    let stages = config.schedule.stages.unwrap_or(1);
    match config.schedule.kind {
        ScheduleKind::Pipedream if trains => {
            return pipedream(ring, selection, stages, devices).map_err(refused);
        }
        ScheduleKind::DoubleBuffered if trains => {
            return pipedream_2bw(ring, selection, stages, devices).map_err(refused);
        }
        _ => {}
    }
    let made = match (config.schedule.kind, file) {
        (_, Some(file)) => file.clone(),
        _ if !trains => Pipeline::gpipe(devices, chunks, count),
        (ScheduleKind::OneForwardOneBackward, _) => {
            Pipeline::one_forward_one_backward(devices, count)
        }
        (ScheduleKind::Interleaved, _) => {
            Pipeline::interleaved(devices, chunks, count).map_err(refused)?
        }
        _ => Pipeline::gpipe(devices, chunks, count),
    };
    let made = if trains { made } else { made.forward_only(count) };
    pipeline(ring, selection, &made).map_err(refused)
}
