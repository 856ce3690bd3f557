"""The hot paths once more in C++, for jobs whose step waits for the CPU: built by the user, used
where it is there."""
