//! Who the listener answers: not another site, not a request that is no look, and everybody else
//! while a crowd holds connections open.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use l2l::telemetry::Server;

fn server() -> (Server, SocketAddr) {
    let anywhere = "127.0.0.1:0".parse().expect("an address");
    let server = Server::start(Some(anywhere), &["gpu1.lab".into()], "tested");
    let server = server.expect("a free port");
    let address = server.address().expect("it listens");
    (server, address)
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a time");
    stream
}

/// The whole answer. A server that refuses what is still being sent may close first.
fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = connect(address);
    _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).expect("ours is UTF-8")
}

fn status(answer: &str) -> &str {
    answer
        .strip_prefix("HTTP/1.1 ")
        .or(answer.strip_prefix("HTTP/1.0 "))
        .map_or(answer, |a| &a[..3])
}

/// A site whose name was made to point here (DNS rebinding) has its name in the Host header: it is
/// refused on every page, with the key that allows a name.
#[test]
fn names_are_answered_only_if_the_config_lists_them() {
    let (_server, address) = server();
    let answered = [
        "127.0.0.1",
        "127.0.0.1:9464",
        "10.1.2.3:80",
        "[::1]:9464",
        "[fe80::1]",
        "localhost",
        "LocalHost:1234",
        "gpu1.lab",
        "GPU1.lab:9464",
    ];
    for host in answered {
        let answer = ask(address, &format!("GET /healthz HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        assert_eq!(status(&answer), "200", "{host}: {answer}");
    }
    let names = [
        "evil.example",
        "evil.example:9464",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "sub.gpu1.lab",
        "gpu1.lab.",
        "127.1",
        "0x7f000001",
        "2130706433",
    ];
    for host in names {
        for path in ["/", "/metrics", "/live.json", "/healthz", "/readyz", "/nowhere"] {
            let answer = ask(address, &format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
            assert_eq!(status(&answer), "421", "{host}: {answer}");
            let name = host.split(':').next().expect("a name");
            assert!(answer.contains(&format!("metrics.hosts = [\"{name}\"]")), "{answer}");
        }
    }
    for host in
        ["", " ", "a b", "user@127.0.0.1", "[::1", "[evil.example]", "127.0.0.1/x", "\u{e9}"]
    {
        let answer = ask(address, &format!("GET /healthz HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        assert!(["400", "421"].contains(&status(&answer)), "{host:?}: {answer}");
    }
}

/// Which host is meant is never for a proxy and this server to see differently.
#[test]
fn a_request_names_one_host() {
    let (_server, address) = server();
    let cases = [
        ("GET /healthz HTTP/1.1\r\n\r\n", "400"),
        ("GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", "400"),
        ("GET /healthz HTTP/1.1\r\nHost: localhost\r\nhost: evil.example\r\n\r\n", "400"),
        ("GET http://evil.example/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", "400"),
        ("GET http://localhost/healthz HTTP/1.1\r\nHost: evil.example\r\n\r\n", "400"),
        ("GET http://evil.example/healthz HTTP/1.1\r\nHost: evil.example\r\n\r\n", "421"),
        ("GET http://localhost/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", "200"),
        ("GET http://localhost/healthz HTTP/1.1\r\n\r\n", "400"),
        // Probes of HTTP/1.0 may leave it out; what they name is checked.
        ("GET /healthz HTTP/1.0\r\n\r\n", "200"),
        ("GET /healthz HTTP/1.0\r\nHost: evil.example\r\n\r\n", "421"),
        ("GET http://evil.example/healthz HTTP/1.0\r\n\r\n", "421"),
        ("CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", "400"),
        ("CONNECT localhost:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n", "405"),
    ];
    for (request, expected) in cases {
        let answer = ask(address, request);
        assert_eq!(status(&answer), expected, "{request:?}: {answer}");
        let (_, text) = answer.split_once("\r\n\r\n").expect("a head");
        assert!(!text.is_empty(), "it says why: {answer}");
    }
}

#[test]
fn what_is_no_look_is_refused() {
    let (_server, address) = server();
    let host = "Host: localhost\r\n";
    let long = "x".repeat(2000);
    let many: String = (0..70).map(|nth| format!("X-{nth}: 1\r\n")).collect();
    let some: String = (0..60).map(|nth| format!("X-{nth}: 1\r\n")).collect();
    let large = "c".repeat(8 << 10);
    let huge = "c".repeat(1 << 16);
    let cases = [
        (format!("DELETE / HTTP/1.1\r\n{host}\r\n"), "405"),
        (format!("POST / HTTP/1.1\r\n{host}Content-Length: 0\r\n\r\n"), "405"),
        (format!("OPTIONS / HTTP/1.1\r\n{host}Origin: http://evil.example\r\n\r\n"), "405"),
        (format!("GET /healthz HTTP/1.1\r\n{host}Content-Length: 3\r\n\r\nabc"), "413"),
        (format!("GET /healthz HTTP/1.1\r\n{host}Content-Length: 99999\r\n\r\n"), "413"),
        (format!("GET /healthz HTTP/1.1\r\n{host}Transfer-Encoding: chunked\r\n\r\n"), "413"),
        (format!("GET /healthz?{long} HTTP/1.1\r\n{host}\r\n"), "414"),
        (format!("GET /healthz HTTP/1.1\r\n{host}{many}\r\n"), "431"),
        (format!("GET /healthz HTTP/1.1\r\n{host}{some}\r\n"), "200"),
        (format!("GET /healthz HTTP/1.1\r\n{host}Cookie: {large}\r\n\r\n"), "200"),
    ];
    for (request, expected) in cases {
        let answer = ask(address, &request);
        assert_eq!(status(&answer), expected, "{request:?}: {answer}");
    }
    // The answer may be lost: the server closes while the rest is being sent.
    let answer = ask(address, &format!("GET /{huge} HTTP/1.1\r\n{host}\r\n"));
    assert!(!answer.contains(" 200 "), "{answer}");
    let answer = ask(address, &format!("GET / HTTP/1.1\r\n{host}Cookie: {huge}\r\n\r\n"));
    assert!(!answer.contains(" 200 "), "{answer}");
}

/// No answer may be read, embedded or framed by another site; the page runs its own script alone.
#[test]
fn other_sites_cannot_read_answers() {
    let (_server, address) = server();
    for path in ["/", "/metrics", "/live.json", "/healthz", "/nowhere"] {
        let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nOrigin: http://a.example");
        let answer = ask(address, &format!("{head}\r\n\r\n")).to_ascii_lowercase();
        let (head, _) = answer.split_once("\r\n\r\n").expect("a head");
        assert!(head.contains("\r\nx-content-type-options: nosniff"), "{head}");
        assert!(head.contains("\r\ncross-origin-resource-policy: same-origin"), "{head}");
        assert!(!head.contains("access-control-"), "{head}");
        let policy =
            head.contains("\r\ncontent-security-policy: default-src 'none'; script-src 'sha");
        assert_eq!(policy, path == "/", "{head}");
        assert_eq!(policy, head.contains("frame-ancestors 'none'"), "{head}");
    }
}

/// Connections that send nothing, one byte of a request, or never read an answer, more than there
/// are places for: whoever asks is answered before any of them gives up.
#[test]
fn health_is_answered_during_a_flood() {
    const ROUNDS: u32 = 16;
    const CROWD: usize = 200;
    /// What a silent connection may hold its place: the server's `PATIENCE`.
    const PATIENCE: Duration = Duration::from_secs(2);
    let (_server, address) = server();
    let begin = Instant::now();
    for round in 0..ROUNDS {
        let mut crowd: Vec<TcpStream> = (0..CROWD)
            .map(|nth| {
                let mut stream = connect(address);
                let said = [&b""[..], b"G", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"];
                _ = stream.write_all(said[nth % said.len()]);
                stream
            })
            .collect();
        // One byte more from each that is still there.
        crowd.iter_mut().for_each(|stream| _ = stream.write_all(b"E"));
        let answer = ask(address, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
        assert_eq!(status(&answer), "200", "round {round}: {answer}");
    }
    // A server whose places a crowd can hold answers once in PATIENCE. This one takes about a
    // hundredth of it, so that a slow machine does not fail here.
    assert!(begin.elapsed() < ROUNDS * PATIENCE * 3 / 4, "{:?}", begin.elapsed());
}
