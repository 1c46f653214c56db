//! The toolkit's stubs of the driver's library. Programs are built with them where there is no
//! driver. If they are on the loader's path, they are found before the driver's library, and every
//! call fails.

use std::env;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The variable with the loader's path.
const PATH: &str = "LD_LIBRARY_PATH";

/// Whether a folder is one of the toolkit's, which are called so.
fn has_stubs(folder: &Path) -> bool {
    folder.ends_with("stubs") && folder.join("libcuda.so").exists()
}

/// Starts the program again, in the same process, if folders of stubs are on the loader's path: now
/// without them. The loader reads its path once, when a program starts.
pub(super) fn leave_out() {
    let Some(path) = env::var_os(PATH) else { return };
    let mut folders: Vec<PathBuf> = env::split_paths(&path).collect();
    let count = folders.len();
    folders.retain(|folder| !has_stubs(folder));
    let Ok(path) = env::join_paths(&folders) else { return };
    let Ok(program) = env::current_exe() else { return };
    if folders.len() == count {
        return;
    }
    let mut arguments = env::args_os();
    let mut again = Command::new(program);
    arguments.next().into_iter().for_each(|name| _ = again.arg0(name));
    // It returns only if it fails. Then the stub is found, and the error names it.
    _ = again.args(arguments).env(PATH, path).exec();
}
