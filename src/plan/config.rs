//! What a plan keeps of the configuration, and what it derives from it.

use std::sync::Arc;

use l2l_actors::schedule::Pipeline;

use crate::compression::Compression;
use crate::config::{Config, EpsTier, StashPlace};
use crate::models::Model;

/// A configuration, and whether the plan is for training.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) config: Config,
    /// False for evaluation and generation: they hold no gradients and no optimizer states.
    pub(super) trains: bool,
    /// The first blocks, which are tiles of tables whose gradients come from the head and from the
    /// embedding, and are joined in a region.
    pub(super) joined_tiles: usize,
    /// The pipeline of the file that the config names, if it does.
    pub(super) pipeline: Option<Arc<Pipeline>>,
}

impl Settings {
    pub(super) fn new(config: &Config, model: &Model, trains: bool) -> Settings {
        let mut settings =
            Settings { config: config.clone(), trains, joined_tiles: 0, pipeline: None };
        let is_tied = model.shape.tied && model.shape.scores_vocabulary();
        settings.joined_tiles = match settings.on_file() {
            false => model.tables.len(),
            true if is_tied => model.tiles.len(),
            true => 0,
        };
        settings
    }

    /// Whether updates wait for the global norm.
    pub(super) fn deferred(&self) -> bool {
        self.trains && self.config.defers()
    }

    /// Whether a step reads the version before the newest.
    pub(super) fn delayed(&self) -> bool {
        self.trains && self.config.schedule.delay().is_some()
    }

    pub(super) fn on_file(&self) -> bool {
        self.config.eps.tier == EpsTier::File
    }

    pub(super) fn stash_on_device(&self) -> bool {
        self.config.stash.place == StashPlace::Device
    }

    /// How gradients are compressed, if they are.
    pub(super) fn compression(&self) -> Option<Compression> {
        self.config.compression().filter(|_| self.trains)
    }

    /// Whether a block's gradient waits in a region.
    pub(super) fn has_region(&self, block: usize) -> bool {
        self.trains && (self.deferred() || block < self.joined_tiles)
    }
}
