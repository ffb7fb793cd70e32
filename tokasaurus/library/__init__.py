"""What Python programs use: clients of a server, engines of their own, and jobs over data sets.

Knows the HTTP API as any client does, and how toka's processes are started and watched. Does not know how a request is
scheduled or computed; loads no torch."""
