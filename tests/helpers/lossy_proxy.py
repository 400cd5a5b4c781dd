"""Between a client and a server: carries every request, and closes the connection in place of every n-th answer."""

import contextlib
import socket
import threading


class LossyProxy:
    """To `port` of this host, from its own `port`. `lost`: how many answers it has kept. Leave it to end it."""

    def __init__(self, port, lost_every):
        self._to, self._lost_every = port, lost_every
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.lost, self._answers, self._lock = 0, 0, threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                threading.Thread(target=self._requests, args=(near, far), daemon=True).start()
                threading.Thread(target=self._answers_of, args=(far, near), daemon=True).start()

    def _requests(self, near, far):
        with contextlib.suppress(OSError):
            while data := near.recv(65536):
                far.sendall(data)
            far.shutdown(socket.SHUT_RDWR)

    def _answers_of(self, far, near):
        with contextlib.suppress(OSError):
            while data := far.recv(65536):
                if self._is_lost():
                    break
                near.sendall(data)
        with contextlib.suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)
        near.close()
        far.close()

    def _is_lost(self):
        with self._lock:
            self._answers += 1
            is_lost = self._answers % self._lost_every == 0
            self.lost += is_lost
            return is_lost
