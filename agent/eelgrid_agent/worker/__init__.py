"""The driver in a process of its own, under a watchdog.

`remote.RemoteDevice` speaks the device port and the control port; `supervisor`
keeps the children that `process` starts, and `watchdog` decides, purely, who is
to blame and what may start; `child` is the process itself. Nothing is imported
here, because the child passes through here and is to stay small.
"""
