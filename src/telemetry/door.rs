//! The rules for requests to the listener, and for the number of connections. A refusal says how to
//! ask instead.
//!
//! A browser lets a page read answers that come from the page's own name. The owner of that name
//! can let it point at 127.0.0.1 (DNS rebinding), and then the page reads this run. Its requests
//! still have the name in their `Host`. So the listener answers to a name only if the config lists
//! it. An IP address cannot be pointed elsewhere, and nobody owns `localhost`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hyper::body::Body;
use hyper::header::HOST;
use hyper::http::uri::Authority;
use hyper::{Method, Request, StatusCode, Version};

/// The most connections at once.
pub(super) const CONNECTIONS: usize = 128;
/// The most connections of one client, so that no client can hold them all.
const OF_A_CLIENT: usize = CONNECTIONS / 4;
/// The most header lines of a request. Browsers send about 20.
pub(super) const HEADERS: usize = 64;
/// The most bytes of a request's head. It has the cookies of all servers on a browser's
/// `localhost`.
pub(super) const HEAD_BYTES: usize = 16 << 10;
/// The most bytes of a request's path and query. The longest path here has 10.
const TARGET_BYTES: usize = 1 << 10;

/// The status and the text that a refused request gets.
pub(super) type Refusal = (StatusCode, String);

/// Refuses a request to a listener that answers to these names, or admits it.
pub(super) fn admit<B: Body>(request: &Request<B>, names: &[String]) -> Result<(), Refusal> {
    check_host(request, names)?;
    let refuse = |status, text: String| Err((status, text));
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return refuse(StatusCode::METHOD_NOT_ALLOWED, "this is only to look at".into());
    }
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    if target > TARGET_BYTES {
        let text = format!("the path has {target} bytes: {TARGET_BYTES} at most");
        return refuse(StatusCode::URI_TOO_LONG, text);
    }
    if !request.body().is_end_stream() {
        let text = "the request has a body: send none".into();
        return refuse(StatusCode::PAYLOAD_TOO_LARGE, text);
    }
    Ok(())
}

fn check_host<B>(request: &Request<B>, names: &[String]) -> Result<(), Refusal> {
    let bad = |text: &str| Err((StatusCode::BAD_REQUEST, text.to_string()));
    let authority = request.uri().authority().map(Authority::as_str);
    let mut hosts = request.headers().get_all(HOST).iter();
    let host = match (hosts.next(), hosts.next()) {
        (Some(host), None) => match host.to_str() {
            Ok(host) => host,
            Err(_) => return bad("the Host header is no text"),
        },
        (Some(_), Some(_)) => return bad("the request has several Host headers: send one"),
        // Probes that speak HTTP/1.0 need no Host header. A browser always sends one.
        (None, _) if request.version() < Version::HTTP_11 => match authority {
            Some(authority) => authority,
            None => return Ok(()),
        },
        (None, _) => return bad("the request has no Host header: send one, as 127.0.0.1"),
    };
    if authority.is_some_and(|authority| !authority.eq_ignore_ascii_case(host)) {
        return bad("the URI names another host than the Host header: send only a path");
    }
    let parsed = host.parse::<Authority>().ok().filter(|_| !host.contains('@'));
    let Some(parsed) = parsed else {
        return bad("the Host header is no address and no name: send it as 127.0.0.1:9464");
    };
    let name = parsed.host();
    if is_answered(name, names) {
        return Ok(());
    }
    let text = format!(
        "the run is not shown under the name {name:?}, for another site could own it: use the IP \
         address or localhost, or set metrics.hosts = [{name:?}]"
    );
    Err((StatusCode::MISDIRECTED_REQUEST, text))
}

fn is_answered(name: &str, names: &[String]) -> bool {
    match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => {
            let is = |other: &str| other.eq_ignore_ascii_case(name);
            name.parse::<Ipv4Addr>().is_ok()
                || is("localhost")
                || names.iter().any(|other| is(other))
        }
    }
}

/// The client that an address stands for. With IPv6 it is the network (/64), because one host can
/// use all addresses of its network.
pub(super) fn client(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (!0 << 64)).into(),
        address => address,
    }
}

/// The index of the open connection that is closed for a new one, if any: the oldest of a client
/// that has too many. `open` has the clients of all connections, the oldest first. So a new
/// connection is always accepted, and a client that asks at once is answered, whatever others hold
/// open.
pub(super) fn to_close(open: &[IpAddr], new: IpAddr) -> Option<usize> {
    let held = |client: IpAddr| open.iter().filter(|other| **other == client).count();
    let of = match held(new) {
        OF_A_CLIENT.. => new,
        _ if open.len() < CONNECTIONS => return None,
        _ => open.iter().copied().max_by_key(|client| held(*client))?,
    };
    open.iter().position(|client| *client == of)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, last).into()
    }

    #[test]
    fn a_client_that_has_too_many_loses_its_oldest() {
        let mut open = vec![ip(2), ip(1)];
        open.extend([ip(1); OF_A_CLIENT - 2]);
        assert_eq!(to_close(&open, ip(1)), None);
        open.push(ip(1));
        assert_eq!(to_close(&open, ip(1)), Some(1));
        assert_eq!(to_close(&open, ip(2)), None, "others lose nothing");
    }

    /// With all places taken, the client with most of them loses one, and not a client with one.
    #[test]
    fn a_crowd_makes_room_for_one() {
        let mut open = vec![ip(9)];
        for client in 1..=4 {
            open.extend([ip(client); OF_A_CLIENT - 1]);
        }
        open.extend([ip(3), ip(8), ip(7)]);
        assert_eq!(open.len(), CONNECTIONS);
        let closed = to_close(&open, ip(6)).expect("all places are taken");
        assert_eq!(closed, open.iter().position(|client| *client == ip(3)).expect("it is there"));
    }

    #[test]
    fn one_host_is_one_client() {
        let parse = |address: &str| client(address.parse().expect("an address"));
        assert_eq!(parse("2001:db8:1:2::3"), parse("2001:db8:1:2:ffff::4"));
        assert_ne!(parse("2001:db8:1:2::3"), parse("2001:db8:1:3::3"));
        assert_eq!(parse("::ffff:10.0.0.1"), ip(1));
        assert_ne!(ip(1), ip(2));
    }
}
