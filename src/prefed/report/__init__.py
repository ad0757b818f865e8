"""Reports: one HTML file that opens offline, and figures for papers."""

from prefed.report.page import write_report

__all__ = ["write_report"]
