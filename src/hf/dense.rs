//! The weights of dense modules, which sentence-transformers keeps in a file and a folder each.

use std::path::Path;

use super::weights::{
    FileTensor, FileTensors, Load, Wanted, file_tensors, read, trained_names, weight_files,
};
use crate::eps::{BlockRun, Eps};
use crate::error::Error;
use crate::models::{DENSE_FOLDERS, Model};

/// The tensors of each dense module, as its file has them, with the module's folder.
pub(super) fn dense_tensors(model: &Model, eps: &Eps) -> Vec<(&'static str, FileTensors)> {
    let all = &file_tensors(model, eps, BlockRun::Parameters);
    let of = |folder: &'static str| {
        let own = |(name, tensor): (&String, &FileTensor)| {
            let name = name.strip_prefix(folder)?.strip_prefix('.')?;
            Some((name.to_string(), tensor.clone()))
        };
        (folder, all.iter().filter_map(own).collect())
    };
    DENSE_FOLDERS
        .map(of)
        .into_iter()
        .filter(|(_, own): &(_, FileTensors)| !own.is_empty())
        .collect()
}

/// The dense modules with a tensor that is trained.
pub(super) fn trained_dense(model: &Model, eps: &Eps) -> Vec<(&'static str, FileTensors)> {
    let trained = trained_names(model);
    let mut all = dense_tensors(model, eps);
    all.retain(|(folder, own)| {
        own.keys().any(|name| trained.contains(&format!("{folder}.{name}")[..]))
    });
    all
}

/// Reads dense modules into the EPS.
pub(super) fn read_dense(
    directory: &Path,
    modules: Vec<(&'static str, FileTensors)>,
    eps: &Eps,
    how: Load,
) -> Result<(), Error> {
    modules.into_iter().try_for_each(|(folder, tensors)| {
        let files = weight_files(&directory.join(folder))?;
        let wanted = Wanted { tensors: &tensors, spelling: None, brought: &[] };
        read(&files, &wanted, eps, how).map(drop)
    })
}
