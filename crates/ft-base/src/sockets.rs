//! Connections between machines: whether the other side has ended, also while bytes of it wait to be read, and a machine that is lost.

use std::ffi::c_int;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// The other side will send no more.
#[cfg(target_os = "linux")]
const NO_MORE: i16 = libc::POLLRDHUP;
#[cfg(not(target_os = "linux"))]
const NO_MORE: i16 = 0;

/// True if the other side has closed the connection, its process has ended, or its machine is lost. Does not wait.
pub fn has_ended(stream: &TcpStream) -> bool {
    let ends = NO_MORE | libc::POLLHUP | libc::POLLERR;
    let mut look = libc::pollfd {
        fd: stream.as_raw_fd(),
        events: NO_MORE,
        revents: 0,
    };
    // SAFETY: one entry, of an open descriptor.
    let found = unsafe { libc::poll(&mut look, 1, 0) };
    found > 0 && look.revents & ends != 0
}

/// Lets the system send keep-alive probes over a connection without traffic: a machine that does not answer for a
/// minute has ended it.
///
/// # Errors
/// The system refuses it.
pub fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    set(stream, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    #[cfg(target_os = "linux")]
    for (option, value) in [
        (libc::TCP_KEEPIDLE, 30),
        (libc::TCP_KEEPINTVL, 10),
        (libc::TCP_KEEPCNT, 3),
    ] {
        set(stream, libc::IPPROTO_TCP, option, value)?;
    }
    Ok(())
}

fn set(stream: &TcpStream, level: c_int, option: c_int, value: c_int) -> io::Result<()> {
    let length = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: it reads one number of this length.
    let code = unsafe { libc::setsockopt(stream.as_raw_fd(), level, option, (&raw const value).cast(), length) };
    if code == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_end_is_seen_before_the_bytes_that_came_before_it() {
        let (mut one, mut other) = pair();
        assert!(!has_ended(&one));
        other.write_all(b"rest").unwrap();
        assert!(!has_ended(&one));
        drop(other);
        let begun = std::time::Instant::now();
        while !has_ended(&one) {
            assert!(begun.elapsed().as_secs() < 20);
        }
        let mut rest = String::new();
        one.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "rest");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_silent_machine_is_asked_for_a_sign_of_life() {
        let (one, _other) = pair();
        let get = |level: c_int, option: c_int| {
            let (mut value, mut length): (c_int, _) = (-1, size_of::<c_int>() as libc::socklen_t);
            // SAFETY: it writes one number of this length.
            let code =
                unsafe { libc::getsockopt(one.as_raw_fd(), level, option, (&raw mut value).cast(), &mut length) };
            assert_eq!(code, 0);
            value
        };
        assert_eq!(get(libc::SOL_SOCKET, libc::SO_KEEPALIVE), 0);
        keep_alive(&one).unwrap();
        let asked = [libc::TCP_KEEPIDLE, libc::TCP_KEEPINTVL, libc::TCP_KEEPCNT].map(|n| get(libc::IPPROTO_TCP, n));
        assert_eq!((get(libc::SOL_SOCKET, libc::SO_KEEPALIVE), asked), (1, [30, 10, 3]));
    }
}
