"""Runners: each takes settings, drives a workload under the methods and writes records."""
