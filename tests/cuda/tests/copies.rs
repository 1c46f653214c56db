//! Copies between the host and the device, which has one engine for each direction.

use l2l_actors::BoxedError;

use super::{config, run};
use crate::config::DeviceKind;
use crate::devices::cuda::driver::{Launch, Stream};
use crate::devices::cuda::emulated::{self, Direction, Limits};
use crate::tensor::Dtype;

/// Of the emulated driver: what is copied to the device waits for what is on its way there, though
/// it is on another stream. Neither a kernel that reads pinned memory nor a copy to the host does.
#[test]
fn copies_wait_for_those_of_other_streams() -> Result<(), BoxedError> {
    if !emulated::instead() {
        return Ok(());
    }
    const LARGE: usize = 1 << 16;
    let copies = emulated::count_copies();
    let driver = emulated::of(Dtype::F32);
    let large = vec![1_u32; LARGE / 4];
    let small = [2_u32];
    let mut pinned = [3_u32];
    let mut back = [[0_u32]; 3];
    let to = driver.allocate(LARGE)?;
    let of_kernel = driver.allocate(8)?;
    // The large one is on its way, and stays so.
    copies.hold(Some(Direction::ToDevice));
    driver.copy_in(Stream::Upload, to, large.as_ptr().cast(), LARGE)?;
    let uploaded = driver.record(Stream::Upload)?;
    copies.wait_for(1, Stream::Upload, Direction::ToDevice);

    driver.copy_out(Stream::Download, back[0].as_mut_ptr().cast(), of_kernel + 4, 4)?;
    let downloaded = driver.record(Stream::Download)?;
    driver.pin(pinned.as_mut_ptr().cast(), 4)?;
    let from = driver.mapped(pinned.as_ptr().cast()).expect("it is pinned");
    let kernel = "copy_words";
    let arguments = &[&of_kernel as _, &from as _, &1_i32 as _];
    let launch = Launch { kernel, grid: [1; 3], block: [256, 1, 1], shared: 0, arguments };
    driver.launch(Stream::Compute, &launch)?;
    let read = driver.record(Stream::Compute)?;
    driver.synchronize(downloaded)?;
    driver.synchronize(read)?;
    // To where the large one goes: the one that is done last stays there.
    driver.copy_in(Stream::Compute, to, small.as_ptr().cast(), 4)?;
    copies.wait_for(1, Stream::Compute, Direction::ToDevice);
    copies.hold(None);
    driver.synchronize(uploaded)?;
    driver.finish();
    for (back, from) in back[1..].iter_mut().zip([of_kernel, to]) {
        driver.copy_out(Stream::Download, back.as_mut_ptr().cast(), from, 4)?;
    }
    driver.finish();
    driver.unpin(pinned.as_mut_ptr().cast());
    assert_eq!(back, [[0], pinned, small]);
    Ok(())
}

/// A step copies nothing to the device on the compute stream, where it would wait for the blocks on
/// their way, unless metadata could not be pinned.
#[test]
fn metadata_that_is_pinned_is_not_copied() {
    if !emulated::instead() {
        return;
    }
    for (pinned, is_copied) in [(None, false), (Some(0), true)] {
        emulated::limit(Limits { pinned, ..Limits::default() });
        let copies = emulated::count_copies();
        run(config(DeviceKind::Cuda), 2).expect("a case of ours");
        let count = |on| copies.count(on, Direction::ToDevice);
        assert!(count(Stream::Upload) > 0);
        assert_eq!(count(Stream::Compute) > 0, is_copied);
    }
}
