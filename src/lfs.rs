//! Recognises a pointer of git-lfs: a small text that a clone without git-lfs has in place of a
//! large file.

/// What to do about a pointer.
pub(crate) const INSTEAD: &str = "it is a pointer of git-lfs, and not the file itself: install \
                                  git-lfs, and run `git lfs pull` in its folder";

/// Whether a file that begins with these bytes is a pointer.
pub(crate) fn is_pointer(start: &[u8]) -> bool {
    start.starts_with(b"version https://git-lfs.github.com/spec/")
}
