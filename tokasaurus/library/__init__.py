"""What a Python program uses: a client of the server, and toka's processes of its own behind a Unix socket.

Knows the HTTP interface as any client does, and how processes are started and watched. Does not know how a request is
scheduled or computed; loads no torch."""
