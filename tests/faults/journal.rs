//! The journal of a process's storage calls, as `shim.cpp` writes it.

/// One call.
#[derive(Clone)]
pub(crate) struct Record {
    /// Its number in its process.
    pub(crate) number: u64,
    /// `r` reads data, `q` asks, `w` writes data, `s` needs space, `d` removes, `o` is output.
    pub(crate) class: char,
    /// `!` if it was made to fail or cut short, `~` if it failed by itself.
    pub(crate) mark: Option<char>,
    pub(crate) name: String,
    pub(crate) inode: u64,
    /// Of a write, its place in the file; of a change of a file's size, the size.
    pub(crate) at: u64,
    pub(crate) path: String,
    /// The new path of what is renamed.
    pub(crate) other: Option<String>,
    pub(crate) data: Vec<u8>,
}

/// Reads a journal. Paths are relative to the folder `below`. The last record is left out where the
/// process ended while it wrote it.
pub(crate) fn read(mut bytes: &[u8], below: &str) -> Vec<Record> {
    let mut all = Vec::new();
    while let Some(end) = bytes.iter().position(|&byte| byte == b'\n') {
        let line = std::str::from_utf8(&bytes[..end]).expect("a line of the shim's");
        let parts: Vec<&str> = line.splitn(7, ' ').collect();
        let [number, class, name, inode, at, length, paths] = parts[..] else {
            panic!("no record: {line}")
        };
        let is_mark = |first: &char| "!~".contains(*first);
        let mark = name.chars().next().filter(is_mark);
        let length: usize = length.parse().expect("a number");
        let relative =
            |path: &str| path.strip_prefix(below).unwrap_or(path).trim_start_matches('/').into();
        if bytes.len() <= end + 1 + length {
            break;
        }
        let mut paths = paths.split('\t');
        all.push(Record {
            number: number.parse().expect("a number"),
            class: class.chars().next().expect("a letter"),
            mark,
            name: name.trim_start_matches(|first| is_mark(&first)).into(),
            inode: inode.parse().expect("a number"),
            at: at.parse().expect("a number"),
            path: paths.next().map(relative).expect("a path"),
            other: paths.next().map(relative),
            data: bytes[end + 1..][..length].to_vec(),
        });
        bytes = &bytes[end + 1 + length + 1..];
    }
    all
}

impl Record {
    /// What it was, to find it again.
    pub(crate) fn told(&self) -> String {
        let path = self.other.as_ref().unwrap_or(&self.path);
        format!("call {} ({} {path})", self.number, self.name)
    }
}
